"""Preparers: an adapter in, a faster one that gives the same answers out."""
