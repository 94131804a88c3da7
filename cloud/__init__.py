"""Rents, lists and terminates VMs, and listens for preemption notices; makes no
decisions."""
