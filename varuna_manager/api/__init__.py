"""What the command line and ``import spottrain`` do alike: start, read, stop and resume jobs."""
