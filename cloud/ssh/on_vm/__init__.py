"""What is sent to a VM over SSH and runs there; standard library only."""
