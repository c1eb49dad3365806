"""Candidate generators: tokens guessed ahead, for the model to check."""
