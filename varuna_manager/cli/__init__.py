"""The ``spottrain`` command line."""
