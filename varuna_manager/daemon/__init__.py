"""The manager process: performs the core's commands and feeds it events."""
