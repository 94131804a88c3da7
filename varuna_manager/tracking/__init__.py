"""Measurements, written to files and trackers by processes of their own."""
