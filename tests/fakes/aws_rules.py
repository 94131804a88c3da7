"""What this project's requests must hold beyond what botocore's model demands.

The model requires next to nothing (RunInstances: two counts). Whatever the adapter
relies on is named here, so that a field that goes missing is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.fakes.aws_model import DriftError
from tests.fakes.paths import has

TAGS = {"spottrain-job", "Name"}
LAUNCH_TAGS = TAGS | {
    "spottrain-owner",
    "spottrain-intent",
    "spottrain-expires",
    "spottrain-usd-per-hour",
    "spottrain-attached-usd-per-hour",
}
_TAGGED = (
    "TagSpecifications.ResourceType",
    "TagSpecifications.Tags.Key",
    "TagSpecifications.Tags.Value",
)
_FILTERED = (("Filters.Name", "Filters.Values"),)

REQUIRED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "RunInstances": (
        (
            "ClientToken",
            "ImageId",
            "InstanceType",
            "KeyName",
            "NetworkInterfaces.DeviceIndex",
            "NetworkInterfaces.SubnetId",
            "NetworkInterfaces.Groups",
            "NetworkInterfaces.AssociatePublicIpAddress",
            "NetworkInterfaces.DeleteOnTermination",
            "BlockDeviceMappings.DeviceName",
            "BlockDeviceMappings.Ebs.VolumeSize",
            "BlockDeviceMappings.Ebs.VolumeType",
            "BlockDeviceMappings.Ebs.DeleteOnTermination",
            "InstanceInitiatedShutdownBehavior",
            "MetadataOptions.HttpTokens",
            "MetadataOptions.HttpPutResponseHopLimit",
            "UserData",
            *_TAGGED,
        ),
    ),
    "DescribeSpotPriceHistory": (("InstanceTypes", "ProductDescriptions", "StartTime"),),
    "GetSpotPlacementScores": (
        ("InstanceTypes", "TargetCapacity", "SingleAvailabilityZone", "RegionNames"),
    ),
    "DescribeImages": (("ImageIds",), ("Owners", "IncludeDeprecated", *_FILTERED[0])),
    "DescribeInstances": _FILTERED,
    "DescribeSecurityGroups": _FILTERED,
    "DescribeSubnets": _FILTERED,
    "DescribeVpcs": _FILTERED,
    "DescribeInternetGateways": _FILTERED,
    "DescribeRouteTables": _FILTERED,
    "DescribeKeyPairs": _FILTERED,
    "CreateTags": (("Resources", "Tags.Key", "Tags.Value"),),
    "ModifyInstanceAttribute": (("InstanceId", "Groups"),),
    "CreateSecurityGroup": (("VpcId", *_TAGGED),),
    "DeleteSecurityGroup": (("GroupId",),),
    "DeleteKeyPair": (("KeyName",),),
    "ImportKeyPair": (_TAGGED,),
    "CreateVpc": (("CidrBlock", *_TAGGED),),
    "CreateSubnet": (("CidrBlock", "AvailabilityZone", *_TAGGED),),
    "CreateInternetGateway": (_TAGGED,),
    "CreateRoute": (("DestinationCidrBlock", "GatewayId"),),
    "GetConsoleOutput": (("Latest",),),
    "AuthorizeSecurityGroupIngress": (("GroupId", "IpPermissions.IpProtocol"),),
    "RevokeSecurityGroupIngress": (("GroupId", "IpPermissions.IpProtocol"),),
}
"""By operation: alternatives, of which one must be there in full."""


def check_rules(operation: str, arguments: Mapping[str, Any]) -> None:
    """Check a request that fits the model already.

    Raises:
        DriftError: something is missing or contradicts itself.
    """
    alternatives = REQUIRED.get(operation, ((),))
    lacks = [[p for p in paths if not has(arguments, p)] for paths in alternatives]
    if all(lacks):
        raise DriftError(f"{operation}: missing: {lacks}")
    for each in arguments.get("Filters", ()):
        if not each.get("Name") or not each.get("Values"):
            raise DriftError(f"{operation}: half a filter: {each}")
    _check_tags(operation, arguments)
    if operation == "RunInstances":
        _check_launch(arguments)
    if operation == "GetSpotPlacementScores" and len(arguments["InstanceTypes"]) < 3:
        # "The returned placement score will always be low": it says nothing.
        raise DriftError(f"scores of {arguments['InstanceTypes']} alone")
    if operation.endswith("SecurityGroupIngress"):
        for rule in arguments["IpPermissions"]:
            _check_rule(rule)


def _check_tags(operation: str, arguments: Mapping[str, Any]) -> None:
    due = LAUNCH_TAGS if operation == "RunInstances" else TAGS
    for spec in arguments.get("TagSpecifications", ()):
        names = {tag["Key"] for tag in spec["Tags"]}
        ours = {name for name in names if name.startswith("spottrain-")}
        if not due <= names or not ours <= due | {"spottrain-uid"}:
            raise DriftError(f"{operation}: tags {sorted(names)}, not {sorted(due)}")


def _check_launch(arguments: Mapping[str, Any]) -> None:
    kinds = {spec["ResourceType"] for spec in arguments["TagSpecifications"]}
    due = {"instance", "volume", "network-interface"}
    market = arguments.get("InstanceMarketOptions")
    if market is not None:
        due.add("spot-instances-request")
        options = market.get("SpotOptions", {})
        wanted = {
            "SpotInstanceType": "one-time",
            "InstanceInterruptionBehavior": "terminate",
        }
        if market.get("MarketType") != "spot" or options != wanted:
            raise DriftError(f"RunInstances: half a spot request: {market}")
    if kinds != due:
        # AWS refuses to tag a spot request that is not made.
        raise DriftError(f"RunInstances: tags on {sorted(kinds)}, not {sorted(due)}")


def _check_rule(rule: Mapping[str, Any]) -> None:
    if rule["IpProtocol"] == "-1":
        fits = bool(rule.get("UserIdGroupPairs")) and all(
            pair.get("GroupId") for pair in rule["UserIdGroupPairs"]
        )
    else:
        fits = {"FromPort", "ToPort"} <= rule.keys() and bool(rule.get("IpRanges"))
        fits = fits and all(each.get("CidrIp") for each in rule["IpRanges"])
    if not fits:
        raise DriftError(f"half a firewall rule: {rule}")
