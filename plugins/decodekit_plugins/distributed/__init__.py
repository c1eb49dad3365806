"""Generation in several processes at once."""
