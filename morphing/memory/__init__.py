"""What a worker holds in device memory, and what a handover needs."""
