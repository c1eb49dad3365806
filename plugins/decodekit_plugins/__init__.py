"""Built-in decodekit plugins: models, candidates, watermarks, stopping, streamers and more."""
