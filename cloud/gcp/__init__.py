"""GCP: spot and on-demand machines of Compute Engine, through google-cloud-compute
(extra ``gcp``).

provider.GcpProvider ─► requests    requests to the API; pure
                     ─► answers     parsing of answers; pure
                     ─► launches    idempotent launches
                     ─► market      offers, quotas, placement scores, price history
                     ─► network     network, subnet and firewall of a job
                     ─► checks      checks of the account
                     ─► ends        end times of VMs no longer listed
                     ─► clients     clients of the SDK, imported on first use
                     ─► translate   errors of the SDK -> port.errors
"""
