"""Replays of markets: deadline policies beside baselines and bounds."""
