"""The manager process, its command line and its state, and the agent on each VM."""
