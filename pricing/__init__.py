"""Prices, budgets, rankings of offers and the deadline policy: pure decisions about money."""
