"""Rents, lists and terminates VMs, and listens for preemption notices; decides
nothing."""
