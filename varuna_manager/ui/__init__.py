"""``spottrain ui``: a local page over all jobs and pools, read from their journals."""
