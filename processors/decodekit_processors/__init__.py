"""Logits processors: reshape the scores of the next token, each one a plugin of the ``processors`` kind."""
