"""Offers, placement scores and quotas of EC2."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spottrain.cloud.aws import requests
from spottrain.cloud.aws.clients import AwsClients
from spottrain.cloud.aws.prices import SpotPrice, spot_prices
from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.aws.translate import translating_errors
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.facts import (
    CloudFacts,
    OnDemandPrice,
    make_offer,
    with_attached,
)
from spottrain.cloud.port.provider import ANY_FAMILY, Offer, Quota, SpotPool
from spottrain.units import counted

logger = logging.getLogger(__name__)

OFFERS_KEEP_S = 30.0
"""The manager polls every second; prices change every few minutes at most."""
_GIB_PER_TIB = 1024
MIN_SCORED_TYPES = 3
"""With fewer instance types a spot placement score "will always be low", whatever there is
(EC2 API reference, GetSpotPlacementScores)."""
_SCORED_REGIONS = 10
"""Most regions of one request (EC2's service model)."""


class AwsMarket:
    """The market of one account."""

    def __init__(
        self,
        clients: AwsClients,
        settings: AwsSettings,
        facts: CloudFacts,
        on_demand: OnDemandPrice,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._facts = facts
        self._on_demand = on_demand
        self._kept: dict[str, tuple[float, list[Offer]]] = {}

    def offers(self, region: str) -> list[Offer]:
        """Return spot offers, and on-demand offers where their price is known."""
        asked_at_s, kept = self._kept.get(region, (-OFFERS_KEEP_S, []))
        if time.monotonic() - asked_at_s < OFFERS_KEEP_S:
            return kept
        asked_at_s, found = time.monotonic(), self._ask_offers(region)
        self._kept[region] = asked_at_s, found
        return found

    def _ask_offers(self, region: str) -> list[Offer]:
        now_s, settings = time.time(), self._settings
        newest: dict[tuple[str, str], SpotPrice] = {}
        for price in spot_prices(self._clients, region, settings.instance_types, now_s):
            key = price.zone, price.instance_type
            if key not in newest or newest[key].since_s < price.since_s:
                newest[key] = price
        found = []
        for (zone, instance_type), price in sorted(newest.items()):
            if settings.zones and zone not in settings.zones:
                continue
            offer = make_offer(
                self._facts,
                cloud=requests.CLOUD,
                region=region,
                zone=zone,
                instance_type=instance_type,
                spot=True,
                usd_per_hour=float(price.usd_per_hour),
                observed_at_s=now_s,
                family=requests.family_of(instance_type),
            )
            found.append(with_attached(offer, settings.attached_usd_per_hour))
            usd = self._on_demand(region, instance_type)
            if usd is not None:
                on_demand = replace(offer, spot=False, usd_per_hour=usd)
                found.append(with_attached(on_demand, settings.attached_usd_per_hour))
        return found

    def spot_pools(self, regions: Sequence[str], count: int) -> list[SpotPool]:
        """Return the spot placement score of each zone, EC2's 1 to 10 scaled to 1.

        A score is one of all types together, each request the same as the one before:
        EC2 bounds how many different ones an account may make in a day.
        """
        types = sorted(self._settings.instance_types)
        if len(types) < MIN_SCORED_TYPES:
            return []
        found = []
        for start in range(0, len(regions), _SCORED_REGIONS):
            asked = list(regions[start : start + _SCORED_REGIONS])
            ec2 = self._clients.get("ec2", asked[0])
            with translating_errors(f"asking for placement scores of {counted(count, 'VM')}"):
                pages = ec2.get_paginator("get_spot_placement_scores").paginate(
                    InstanceTypes=types,
                    TargetCapacity=count,
                    SingleAvailabilityZone=True,
                    RegionNames=asked,
                )
                rows = [row for page in pages for row in page["SpotPlacementScores"]]
                scored = sorted({row["Region"] for row in rows})
                zones = {region: self._zone_names(region) for region in scored}
            for row in rows:
                zone = zones[row["Region"]].get(row["AvailabilityZoneId"])
                if zone is not None:
                    found += [
                        SpotPool(
                            cloud=requests.CLOUD,
                            region=row["Region"],
                            zone=zone,
                            instance_type=name,
                            obtainability=row["Score"] / 10,
                        )
                        for name in types
                    ]
        return found

    def quotas(self, region: str) -> list[Quota]:
        """Return the quotas of our types, in virtual CPUs, and of their disks, in VMs.

        Addresses that come with a VM count against none.
        """
        client = self._clients.get("service-quotas", region)
        codes = requests.quota_codes(self._settings.instance_types)
        found = []
        with translating_errors(f"asking for quotas in {region}"):
            for (family, spot), code in codes.items():
                answer = client.get_service_quota(ServiceCode="ec2", QuotaCode=code)
                limit = float(answer["Quota"]["Value"])
                quota = Quota(region=region, family=family, spot=spot, limit=limit, unit="vcpu")
                found.append(quota)
        return found + self._disk_quotas(client, region)

    def _disk_quotas(self, client: Any, region: str) -> list[Quota]:
        code = requests.DISK_QUOTA
        try:
            with translating_errors(f"asking for the quota of disks in {region}"):
                answer = client.get_service_quota(ServiceCode="ebs", QuotaCode=code)
        except CloudError as error:  # a refusal will tell
            logger.info("%s", error)
            return []
        limit_gib = float(answer["Quota"]["Value"]) * _GIB_PER_TIB
        vms = limit_gib / self._settings.disk_gib
        return [Quota(region=region, family=ANY_FAMILY, spot=False, limit=vms, unit="vm")]

    def _zone_names(self, region: str) -> dict[str, str]:
        """Return this account's zone names by zone id."""
        ec2 = self._clients.get("ec2", region)
        zones = ec2.describe_availability_zones()["AvailabilityZones"]
        return {zone["ZoneId"]: zone["ZoneName"] for zone in zones}
