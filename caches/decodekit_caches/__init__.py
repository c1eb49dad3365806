"""Key/value caches, each a plugin of kind ``caches``."""
