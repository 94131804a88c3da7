"""Code that is sent to VMs over SSH and runs there; standard library only."""
