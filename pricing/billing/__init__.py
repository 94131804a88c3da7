"""Money: exact amounts, the ledger, budgets, billing terms, egress."""
