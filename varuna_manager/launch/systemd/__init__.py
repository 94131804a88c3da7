"""Managers that systemd keeps running."""
