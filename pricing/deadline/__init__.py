"""The deadline policy: which VMs to hold so that a job is done in time and in budget."""
