"""Pools as Gavel has them: shares of time, in rounds, at fixed sizes."""
