"""The core's data: state, records, events, commands, settings, tables of phases."""
