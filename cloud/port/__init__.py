"""The cloud port: the protocol that every provider implements, and the types it speaks in."""
