"""Many jobs on one pool of VMs and one budget."""
