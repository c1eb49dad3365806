"""Hubs: where configurations are fetched from and uploaded to."""
