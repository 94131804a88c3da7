"""Choosing a plan: partition, placement, bounds, and the search over shapes."""
