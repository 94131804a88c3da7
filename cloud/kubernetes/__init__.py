"""A Kubernetes cluster as a provider: a VM is a pod that runs an agent."""
