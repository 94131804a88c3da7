"""Money, pure: which offer is worth most, what is spent, what a budget still bears."""
