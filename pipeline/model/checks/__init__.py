"""Checks of the user's code by running it small, before anything is rented."""
