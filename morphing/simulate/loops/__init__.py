"""Loops over whole numbers that numba compiles, and the rule that they share."""
