"""Market replays that only ``spottrain simulate`` and benches call."""
