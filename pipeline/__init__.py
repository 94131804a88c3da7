"""Executes a plan: the training runtime in each worker process (torch)."""
