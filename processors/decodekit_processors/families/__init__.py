"""Processors that serve one family of models: Whisper, Bark, MusicGen, Dia."""
