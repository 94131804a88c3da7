"""Azure: spot and on-demand virtual machines, through Azure's SDK (extra ``azure``).

provider.AzureProvider ─► requests   what is sent, and answers: what comes back; pure
                       ─► launches   one VM each: made, waited for, cleared away
                       ─► network    resource group, subnet, rules, identity of a job
                       ─► market     sizes, zones, prices, quotas
                       ─► clients    the SDK, imported when the first call is made
                       ─► translate  what the SDK raises -> cloud.errors
"""
