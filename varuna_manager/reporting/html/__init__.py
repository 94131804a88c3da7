"""A job's report as one self-contained HTML page."""
