"""Model adapters and the models that ship with decodekit."""
