"""Watches beside the core: at measurements, for what decisions depend on, and at VMs' starts."""
