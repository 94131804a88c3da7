"""The agent: our process on each VM, without torch."""
