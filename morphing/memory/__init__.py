"""Device memory of workers while they train and during a handover."""
