"""SSH connections to hosts, and the tunnels and channels that run over them."""
