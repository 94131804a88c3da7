"""``spottrain simulate``: what-if runs that rent nothing."""
