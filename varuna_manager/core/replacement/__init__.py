"""VMs that others take the place of while the job runs: slow ones, expensive ones."""
