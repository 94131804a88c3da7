"""Schedules as data, run-length encoded, and the rule by which a stage picks its next task."""
