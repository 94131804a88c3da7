"""The cloud port: the protocol that every provider implements, and its types."""
