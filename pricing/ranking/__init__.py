"""Ranks offers by training per dollar."""
