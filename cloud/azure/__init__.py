"""Azure: spot and on-demand virtual machines, through Azure's SDK (extra ``azure``).

provider.AzureProvider ─► requests   requests and answers of the API; pure
                       ─► launches   creation and deletion of single VMs
                       ─► network    resource group, subnet, rules, identity of a job
                       ─► market     sizes, zones, prices, quotas
                       ─► clients    clients of the SDK, imported on first use
                       ─► translate  errors of the SDK -> port.errors
"""
