"""A compact Llama-layout decoder in plain PyTorch and its adapter."""
