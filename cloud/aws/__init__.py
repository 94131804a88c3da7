"""AWS: spot and on-demand machines of EC2, through boto3 (extra ``aws``).

provider.AwsProvider ─► requests   what is sent; pure
                     ─► network    subnet, security group, key pair, image of a job
                     ─► clients    boto3, imported when the first call is made
                     ─► translate  what boto3 raises -> cloud.errors
"""
