"""Reports on a job for people and programs."""
