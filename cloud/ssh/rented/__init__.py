"""Rented VMs of any cloud, used over SSH."""
