"""Cloud SDKs in child processes, and the process trees of VMs."""
