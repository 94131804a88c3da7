"""The mini-batch of a replica, event by event."""
