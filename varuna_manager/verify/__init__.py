"""``spottrain verify``: trains a fixed small model through losses, and checks what came out."""
