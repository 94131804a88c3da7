"""The user's own hosts as a provider, and how a host gets its agent."""
