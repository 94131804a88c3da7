"""The job's data on a machine: fetched once into a cache, mounted, or already there.

Standard library only, and our storage for what lies in object stores: it runs on VMs,
where ``python -m spottrain.cloud.data`` brings what one job wants.
"""
