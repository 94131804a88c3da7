"""Loader processes: make micro-batches before a worker asks for them."""
