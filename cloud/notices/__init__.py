"""Preemption notices, heard on the VM from its metadata service."""
