"""Tokenizers of transformers, of `tokenizers`, and any object with `encode` and `decode`."""
