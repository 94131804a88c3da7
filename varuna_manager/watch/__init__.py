"""Watches beside the core: they look at measurements, and say what decisions depend on."""
