"""Planners of other papers' systems, which spottrain does not run."""
