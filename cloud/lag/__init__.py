"""Compensates for lists that lag behind: VMs just launched, VMs just ended."""
