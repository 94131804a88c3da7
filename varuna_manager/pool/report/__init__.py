"""What a pool does and did, for people and programs."""
