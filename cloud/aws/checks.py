"""Checks of an AWS account, without renting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from spottrain.cloud.aws import prices, requests
from spottrain.cloud.aws.clients import AwsClients
from spottrain.cloud.aws.market import AwsMarket
from spottrain.cloud.aws.network import AwsNetwork
from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.aws.translate import code_of, translating_errors
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.facts import check_offered
from spottrain.cloud.port.provider import Finding, run_check
from spottrain.cloud.ssh_keys import new_host_key
from spottrain.suggest import did_you_mean
from spottrain.units import counted

_PERMITTED = ("DryRunOperation", "VPCIdNotSpecified")
"""Codes of allowed dry runs; the second one if the account has no default VPC."""
_QUOTAS_URL = "https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas"
_JOB = "doctor"


class AwsChecks:
    """Checks what a job needs, one item after the other."""

    def __init__(
        self,
        clients: AwsClients,
        settings: AwsSettings,
        network: AwsNetwork,
        market: AwsMarket,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._network = network
        self._market = market

    def run(self) -> Iterator[Finding]:
        """Yield findings; stop if credentials are refused."""
        try:
            regions = prices.regions(self._clients)
        except CloudError as error:
            yield Finding(what="credentials", ok=False, message=str(error))
            return
        detail = (
            f"credentials are valid; {counted(len(regions), 'region is', 'regions are')} enabled"
        )
        yield Finding(what="credentials", ok=True, message=detail)
        for region in self._settings.regions or regions:
            if region in regions:
                yield from self._region(region)
                continue
            hint = did_you_mean(region, regions) or "enable it in the account"
            detail = f"not an enabled region of this account: got {region}; {hint}"
            yield Finding(what=f"region {region}", ok=False, message=detail)

    def _region(self, region: str) -> Iterator[Finding]:
        yield run_check(f"image {region}", lambda: self._image(region))
        types = run_check(f"types {region}", lambda: self._types(region), "types")
        yield types
        if not types.ok:
            return
        for call in ("run_instances", "create_security_group", "import_key_pair"):
            what = f"permission {region} {call}"
            yield run_check(what, lambda call=call: self._permitted(region, call))  # type: ignore[misc]
        try:
            quotas = self._market.quotas(region)
        except CloudError as error:
            detail = str(error)
            yield Finding(what=f"quota {region}", ok=False, message=detail, one_of="quota")
            return
        for quota in quotas:
            if quota.spot:
                yield _quota(region, quota.family, quota.limit)

    def _image(self, region: str) -> str:
        with translating_errors(f"looking for the image in {region}"):
            return str(self._network.image(region)["ImageId"])

    def _types(self, region: str) -> str:
        wanted = self._settings.instance_types
        return check_offered(region, wanted, self._offered(region))

    def _offered(self, region: str) -> list[str]:
        """Return the wanted types that a region has."""
        wanted: Sequence[str] = self._settings.instance_types
        ec2 = self._clients.get("ec2", region)
        filters = [{"Name": "instance-type", "Values": list(wanted)}]
        with translating_errors(f"asking for types in {region}"):
            pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
                LocationType="region", Filters=filters
            )
            offered = {
                row["InstanceType"] for page in pages for row in page["InstanceTypeOfferings"]
            }
        return [kind for kind in wanted if kind in offered]

    def _permitted(self, region: str, call: str) -> str:
        """Check by a dry run that a call is allowed.

        Raises:
            CloudError: it is not allowed.
        """
        from botocore.exceptions import ClientError

        method = getattr(self._clients.without_retries("ec2", region), call)
        with translating_errors(f"trying {call} in {region}"):
            try:
                method(DryRun=True, **self._arguments(region, call))
            except ClientError as error:
                if code_of(error) not in _PERMITTED:
                    raise
        return "allowed"

    def _arguments(self, region: str, call: str) -> dict[str, Any]:
        kind = call.removeprefix("create_").removeprefix("import_").replace("_", "-")
        vm_tags = {
            "TagSpecifications": requests.tagged(kind, _JOB, f"spottrain-{_JOB}", self._settings)
        }
        if call == "create_security_group":
            group = {"GroupName": tags.JOB, "Description": "a dry run", **vm_tags}
            subnet = self._network.named_subnet(region)
            return {**group, "VpcId": subnet["VpcId"]} if subnet else group
        if call == "import_key_pair":
            return {
                "KeyName": tags.JOB,
                # Checked before it is known to be a dry run, as far as anybody knows.
                "PublicKeyMaterial": new_host_key()[1].encode(),
                **vm_tags,
            }
        return {
            **self._placement_arguments(region),
            "ImageId": self._network.image(region)["ImageId"],
            "InstanceType": self._offered(region)[0],
            "MinCount": 1,
            "MaxCount": 1,
            "InstanceMarketOptions": {"MarketType": "spot"},
            "TagSpecifications": requests.tagged(
                "instance", _JOB, f"spottrain-{_JOB}", self._settings
            ),
        }

    def _placement_arguments(self, region: str) -> dict[str, Any]:
        """Return the subnet, groups and profile that the job file names.

        Raises:
            MisconfiguredError: some do not exist.
        """
        arguments: dict[str, Any] = {}
        self._network.check_groups(region)
        if subnet := self._network.named_subnet(region):
            arguments["SubnetId"] = subnet["SubnetId"]
            if self._settings.security_groups:
                arguments["SecurityGroupIds"] = list(self._settings.security_groups)
        if self._settings.instance_profile:
            arguments["IamInstanceProfile"] = {"Name": self._settings.instance_profile}
        return arguments


def _quota(region: str, family: str, limit: float) -> Finding:
    what = f"quota {region} {family} spot"
    detail = f"{limit:g} virtual CPUs"
    if limit <= 0:
        detail += f": nothing can be rented; ask AWS for more at {_QUOTAS_URL}"
    return Finding(what=what, ok=limit > 0, message=detail, one_of="quota")
