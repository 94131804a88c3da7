"""The managers of jobs on machines of their own: VMs, batch jobs and pods."""
