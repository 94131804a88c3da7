"""The core's data: state, records, events, commands, settings."""
