"""What decides keeps its events, and what it decided because of them, in one file."""
