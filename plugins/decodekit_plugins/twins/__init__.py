"""What preparers share: a second tree of modules over the same weights, and a table of what is known of models."""
