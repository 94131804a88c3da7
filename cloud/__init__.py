"""Rents, lists and returns VMs, and hears preemption notices; decides nothing."""
