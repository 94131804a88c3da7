"""Jobs that arrive on a pool, in virtual time: what ``spottrain simulate pool`` and benches call."""
