"""Leaves of the runtime: fault injection, heap trimming, memory tracking."""
