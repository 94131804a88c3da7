"""GCP: spot and on-demand machines of Compute Engine, through google-cloud-compute
(extra ``gcp``).

provider.GcpProvider ─► requests    what is sent; pure
                     ─► answers     what comes back; pure
                     ─► launches    one launch, whatever breaks on the way
                     ─► market      offers, quotas, placement scores, price history
                     ─► network     network, subnet and firewall of a job
                     ─► checks      whether a job could rent
                     ─► ends        when VMs ended that are no longer listed
                     ─► clients     the SDK, imported when the first call is made
                     ─► translate   what the SDK raises -> cloud.errors
"""
