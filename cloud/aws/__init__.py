"""AWS: spot and on-demand machines of EC2, through boto3 (extra ``aws``).

provider.AwsProvider ─► requests   requests and answers of the API; pure
                     ─► network    subnet, security group, key pair, image of a job
                     ─► clients    clients of boto3, imported on first use
                     ─► translate  errors of boto3 -> port.errors
"""
