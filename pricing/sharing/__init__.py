"""Allocation policies over several jobs, as linear programs."""
