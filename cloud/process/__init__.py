"""Child processes: cloud SDKs that run in one of their own, and process trees of a VM."""
