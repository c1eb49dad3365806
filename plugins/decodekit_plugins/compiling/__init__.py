"""torch.compile of the model's decoding step."""
