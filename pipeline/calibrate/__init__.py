"""Measuring a model on its hardware for the planner."""
