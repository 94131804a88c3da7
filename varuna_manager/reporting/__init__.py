"""What happened to a job, for people and programs."""
