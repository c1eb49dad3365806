"""Decoding strategies and token selectors, each one a plugin of the ``strategies`` or ``selectors`` kind."""
