"""Regions and zones as clouds write them, and whether what is given for them is used."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_REGIONS = {
    "aws": (re.compile(r"[a-z]{2}(-[a-z]+)+-\d+"), "us-east-1"),
    "azure": (re.compile(r"[a-z]+\d*"), "eastus"),
    "gcp": (re.compile(r"[a-z]+-[a-z]+\d+"), "us-central1"),
}


def check_places(cloud: str, regions: Sequence[str], zones: Collection[str]) -> None:
    """Check the form of regions, and that some of the zones are in them.

    Raises:
        ValueError: nothing could be rented there; with what to write instead.
    """
    form, example = _REGIONS[cloud]
    for region in regions:
        if not form.fullmatch(region):
            raise ValueError(
                f"regions: must be names of {cloud}'s regions, such as {example}: got "
                f"{region}"
            )
    if zones and not any(
        zone.startswith(region) for zone in zones for region in regions
    ):
        raise ValueError(
            f"zones: {', '.join(zones)}: none is in the regions {', '.join(regions)}"
        )


def check_keys(
    key: str, given: Collection[str], regions: Sequence[str], example: str
) -> None:
    """Check that what is given by region or zone is of use.

    Raises:
        ValueError: nothing is given for a region, and something for none of them: a name
            is misspelt, and the region's VMs would be somewhere else.
    """
    stray = [name for name in given if not name.startswith(tuple(regions))]
    bare = [
        each for each in regions if not any(name.startswith(each) for name in given)
    ]
    if stray and bare:
        raise ValueError(
            f"{key}: {stray[0]} is none of the job's; {bare[0]} has none: give names such "
            f"as {example}"
        )
