"""What crosses processes and machines, as JSON; standard library only.

This package is carried to machines as it is.
"""
