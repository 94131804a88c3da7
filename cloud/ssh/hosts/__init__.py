"""The user's own hosts as a provider, and the bootstrap of agents."""
