"""A job's data on a machine: fetched once into a cache, mounted, or already there.

Uses only the standard library, and our storage for object stores: it runs on VMs as
``python -m spottrain.cloud.data``.
"""
