"""Where prices come from: one module a cloud."""
