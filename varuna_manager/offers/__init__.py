"""What a job could rent, what it is worth to it, and whether its deadline is feasible."""
