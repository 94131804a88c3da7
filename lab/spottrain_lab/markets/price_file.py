"""Files of recorded spot prices: ``cloud,zone,instance_type,observed_at,usd_per_hour``."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from spottrain.errors import ConfigError, shortened
from spottrain.pricing.prices.place import Place

COLUMNS = ("cloud", "zone", "instance_type", "observed_at", "usd_per_hour")
_REGION = {"aws": r"[a-z]$", "gcp": r"-[a-z]$"}
"""Suffix of a zone's name after its region's, by cloud."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of an instance type."""

    gpu: str
    count: int


INSTANCES: Mapping[str, Gpus] = {
    "p2.xlarge": Gpus("k80", 1),
    "p2.8xlarge": Gpus("k80", 8),
    "p2.16xlarge": Gpus("k80", 16),
    "p3.2xlarge": Gpus("v100", 1),
    "p3.8xlarge": Gpus("v100", 4),
    "p3.16xlarge": Gpus("v100", 8),
    "NC6": Gpus("k80", 1),
    "NC12": Gpus("k80", 2),
    "NC24": Gpus("k80", 4),
    "NC6s v2": Gpus("p100", 1),
    "NC12s v2": Gpus("p100", 2),
    "NC24s v2": Gpus("p100", 4),
    "NC6s v3": Gpus("v100", 1),
    "NC12s v3": Gpus("v100", 2),
    "NC24s v3": Gpus("v100", 4),
}
"""The instance types of the dissertation's chapter 6. Azure's RDMA variants (NC24r, ...)
hold the same GPUs for more money and are left out there and here."""


DayPrices = Mapping[Place, tuple[float, ...]]
"""Prices of one day, in the file's order: USD per hour of the whole instance; a day may
have several."""


@dataclass(frozen=True, slots=True)
class PriceFile:
    """Prices by day."""

    days: Mapping[date, DayPrices]
    """By ascending date."""
    notices: tuple[str, ...]
    """A line for each kind of rows left out."""

    def regions(self) -> dict[str, str]:
        """Return the cloud of each region, in the file's order."""
        places = (place for day in self.days.values() for place in day)
        return {place.region: place.cloud for place in places}


def region_of(cloud: str, zone: str) -> str:
    """Return the region of a zone; the zone itself where a cloud prices by region."""
    return re.sub(_REGION.get(cloud, "$^"), "", zone)


def parse_prices(text: str) -> PriceFile:
    """Read a file of spot prices, by day.

    Rows of unknown instance types, and without a price above 0, are left out and counted
    in the notices.

    Raises:
        ConfigError: wrong columns, an invalid date, or no rows left.
    """
    try:
        return _parse(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise ConfigError(f"must be rows of CSV: {error}; fix the file") from error


def _parse(reader: csv.DictReader[str]) -> PriceFile:
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ConfigError(
            f"columns: got {shortened(','.join(reader.fieldnames or ()) or 'none')}; write "
            f"{','.join(COLUMNS)}"
        )
    found: dict[date, dict[Place, list[float]]] = {}
    unknown: Counter[str] = Counter()
    priceless = 0
    for row in reader:
        if row["instance_type"] not in INSTANCES:
            unknown[row["instance_type"] or "none"] += 1
            continue
        usd = _price(row["usd_per_hour"])
        if usd is None:
            priceless += 1
            continue
        place = _place(row, reader.line_num)
        day = found.setdefault(_day(row["observed_at"], reader.line_num), {})
        day.setdefault(place, []).append(usd)
    if not found:
        raise ConfigError(
            f"no row has a price of a known instance type; known are {', '.join(INSTANCES)}"
        )
    days = {
        day: {place: tuple(seen) for place, seen in found[day].items()} for day in sorted(found)
    }
    return PriceFile(days, tuple(_notices(unknown, priceless)))


def _notices(unknown: Counter[str], priceless: int) -> list[str]:
    notices = [
        f"{count} rows of {kind} left out: not among the instance types compared"
        for kind, count in sorted(unknown.items())
    ]
    if priceless:
        notices.append(f"{priceless} rows left out: no price above 0")
    return notices


def _place(row: Mapping[str, str], number: int) -> Place:
    if not row["cloud"] or not row["zone"]:
        raise ConfigError(f"row {number}: no cloud or no zone; give both")
    region = region_of(row["cloud"], row["zone"])
    return Place(row["cloud"], region, row["zone"], row["instance_type"])


def _day(text: str | None, number: int) -> date:
    try:
        return date.fromisoformat((text or "")[:10])
    except ValueError as error:
        raise ConfigError(
            f"row {number}: observed_at: got {shortened(text)}; write 2020-02-27 or "
            "2020-02-27T04:42:58Z"
        ) from error


def _price(text: str | None) -> float | None:
    """Return a price such as ``0.24`` or ``$0.24``, None if it is none above 0."""
    try:
        usd = float((text or "").strip().removeprefix("$"))
    except ValueError:
        return None
    return usd if math.isfinite(usd) and usd > 0 else None
