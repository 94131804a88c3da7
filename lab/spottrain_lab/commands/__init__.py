"""Commands of ``spottrain simulate``, registered by entry points."""
