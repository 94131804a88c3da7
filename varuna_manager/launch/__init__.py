"""Use cases on one job: submit, control, take over, measure."""
