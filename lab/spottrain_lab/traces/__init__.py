"""Replays of availability: plans and rules beside an all-knowing one."""
