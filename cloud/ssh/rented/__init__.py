"""Rented VMs of any cloud, entered and served over SSH."""
