"""Ways in that people know from transformers: `generate` as a method, custom loops, transition scores."""
