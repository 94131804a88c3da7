"""Bridges what clouds list late: VMs just launched, VMs just ended."""
