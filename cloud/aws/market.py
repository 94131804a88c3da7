"""Offers, spot prices, placement scores and quotas of EC2."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from spottrain.cloud.aws import requests
from spottrain.cloud.aws.clients import AwsClients
from spottrain.cloud.aws.prices import spot_prices
from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.aws.translate import translating_errors
from spottrain.cloud.port.facts import (
    CloudFacts,
    OnDemandPrice,
    make_offer,
    with_attached,
)
from spottrain.cloud.port.provider import Offer, PlacementScore, Quota

OFFERS_KEEP_S = 30.0
"""The manager polls every second; prices change every few minutes at most."""


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
        now_s, attached = time.time(), self._settings.attached_usd_per_hour
        newest: dict[tuple[str, str], Offer] = {}
        for offer in self.prices(region, now_s):
            key = offer.zone, offer.instance_type
            if key not in newest or newest[key].observed_at_s < offer.observed_at_s:
                newest[key] = offer
        found = []
        for _, offer in sorted(newest.items()):
            spot = replace(offer, observed_at_s=now_s)
            found.append(with_attached(spot, attached))
            usd = self._on_demand(region, offer.instance_type)
            if usd is not None:
                on_demand = replace(spot, spot=False, usd_per_hour=usd)
                found.append(with_attached(on_demand, attached))
        return found

    def prices(self, region: str, since_s: float) -> list[Offer]:
        """Return the spot prices since a time, including the one valid then."""
        zones, types = self._settings.zones, self._settings.instance_types
        return [
            make_offer(
                self._facts,
                cloud=requests.CLOUD,
                region=region,
                zone=price.zone,
                instance_type=price.instance_type,
                spot=True,
                usd_per_hour=float(price.usd_per_hour),
                observed_at_s=price.since_s,
                family=requests.family_of(price.instance_type),
            )
            for price in spot_prices(self._clients, region, types, since_s)
            if not zones or price.zone in zones
        ]

    def placement_scores(self, instance_type: str, count: int) -> list[PlacementScore]:
        """Return the spot placement score of each zone (EC2's 1 to 10, scaled to 1)."""
        regions: Sequence[str] = self._settings.regions
        ec2 = self._clients.get("ec2", regions[0])
        with translating_errors(f"asking for placement scores of {instance_type}"):
            pages = ec2.get_paginator("get_spot_placement_scores").paginate(
                InstanceTypes=[instance_type],
                TargetCapacity=count,
                SingleAvailabilityZone=True,
                RegionNames=list(regions),
            )
            rows = [row for page in pages for row in page["SpotPlacementScores"]]
            zones = {region: self._zone_names(region) for region in regions}
        return [
            PlacementScore(
                region=row["Region"],
                zone=zones[row["Region"]].get(row["AvailabilityZoneId"], ""),
                score=row["Score"] / 10,
            )
            for row in rows
        ]

    def quotas(self, region: str) -> list[Quota]:
        """Return the quotas of our types, in virtual CPUs."""
        client = self._clients.get("service-quotas", region)
        codes = requests.quota_codes(self._settings.instance_types)
        found = []
        with translating_errors(f"asking for quotas in {region}"):
            for (family, spot), code in codes.items():
                answer = client.get_service_quota(ServiceCode="ec2", QuotaCode=code)
                limit = float(answer["Quota"]["Value"])
                quota = Quota(
                    region=region, family=family, spot=spot, limit=limit, unit="vcpu"
                )
                found.append(quota)
        return found

    def _zone_names(self, region: str) -> dict[str, str]:
        """Return this account's zone names by zone id."""
        ec2 = self._clients.get("ec2", region)
        zones = ec2.describe_availability_zones()["AvailabilityZones"]
        return {zone["ZoneId"]: zone["ZoneName"] for zone in zones}
