"""A Slurm cluster as a provider: a VM is a batch job of one node that runs an agent."""
