"""Committed state: memory that outlives workers, commit, handover, checkpoints."""
