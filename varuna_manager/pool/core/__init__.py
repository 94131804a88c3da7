"""The pool's decisions: pure functions from state and event to state and commands."""
