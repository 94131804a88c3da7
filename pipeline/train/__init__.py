"""One generation of training: schedule execution and gradient reduction."""
