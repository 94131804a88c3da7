"""Adapting a running plan: stragglers, new shares, and when a morph pays."""
