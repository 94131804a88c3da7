"""Pure mathematics of a plan: no I/O, no clock, no torch."""
