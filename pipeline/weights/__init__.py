"""Weights that leave a job for other programs, and weights that a job begins with."""
