"""Knowledge of the market: catalogue, prices, preemption hazard, and their sources."""
