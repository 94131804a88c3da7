"""Availability traces replayed under several rules."""
