"""What a worker computes on: its memory, the transfers to and from it, its clock."""
