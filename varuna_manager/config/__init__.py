"""The job file: its sections, validated before anything is rented."""
