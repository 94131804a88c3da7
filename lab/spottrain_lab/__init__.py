"""What evaluates policies and plans and runs no job: commands of ``spottrain simulate``."""
