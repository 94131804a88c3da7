"""Event simulation of one mini-batch under a plan."""
