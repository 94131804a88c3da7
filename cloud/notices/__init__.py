"""Preemption notices, read on the VM from its metadata service."""
