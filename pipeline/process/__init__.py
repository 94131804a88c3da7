"""Processes on a VM: the supervisor and the workers that it forks."""
