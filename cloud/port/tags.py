"""Tags of all rented resources (design: section 5), and whose they are.

Names of tags use only characters that every cloud allows; GCP labels are the most
restrictive.

A resource is a job's if its uid tag is the job's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from spottrain.cloud.port.settings import CloudSettings

JOB = "spottrain-job"
"""Name of the job; ``gc`` finds orphans by it."""
UID = "spottrain-uid"
"""Unique id of the job: two people may give two jobs one name."""
OWNER = "spottrain-owner"
"""Who rented: the cloud's name of the account's principal, unless the job file names
one."""
INTENT = "spottrain-intent"
"""The launch intent that a VM fulfils."""
MANAGER = "manager"
"""Intent of the VM that a job's manager runs on; the core never launches with it."""
ORDERED = "ordered-"
"""What the intent of a VM begins with that was another job's before; the order's name
follows."""
TAKEN = "spottrain-taken"
"""Of a VM that was another job's before: how often it has gone from one job to another, and
since when it is this one's, in microseconds since the epoch, as ``2-1764284000000000``."""
PRICE = "spottrain-usd-per-hour"
"""Price at launch; absent where labels cannot hold a decimal point."""
ATTACHED = "spottrain-attached-usd-per-hour"
"""The part of it for the VM's disk and public address."""
EXPIRES = "spottrain-expires"
"""Lease in whole seconds: a VM ends this long after it last heard from a manager.

A duration, not a time: a launch repeated with its token must be identical, or the
cloud refuses it.
"""
_OURS = "spottrain-"
_OWN_TAGS = 10
"""How many of a resource's tags are ours at most, "Name" of AWS among them."""


def of_job(job: str, settings: CloudSettings) -> dict[str, str]:
    """Return the tags that every resource of a job has."""
    uid = {UID: settings.uid} if settings.uid else {}
    return {**settings.tags, JOB: job, **uid}


def is_ours(found: Mapping[str, str], job: str, settings: CloudSettings) -> bool:
    """Return True if a resource with these tags is the job's, and not another's of its name."""
    return found.get(JOB) == job and found.get(UID, "") == settings.uid


def ordered(order: str) -> str:
    """Return the intent of a VM that came from another job by an order."""
    return f"{ORDERED}{order}"


def order_of(intent: str) -> str:
    """Return the order by which a VM came from another job; empty if it was launched."""
    return intent.removeprefix(ORDERED) if intent.startswith(ORDERED) else ""


def taken(hops: int, since_s: float) -> str:
    """Return the value of ``TAKEN`` of a VM that a job has since a moment."""
    return f"{hops}-{round(since_s * 1e6)}"


def taken_of(found: Mapping[str, str]) -> tuple[int, float]:
    """Return how often a VM with these tags has changed jobs, and since when its job has it.

    (0, 0.0) if it was launched for its job.
    """
    hops, _, since_us = found.get(TAKEN, "0-0").partition("-")
    return int(hops), int(since_us) / 1e6


def key_of(job: str, uid: str) -> str:
    """Return what the names of a job's resources derive from."""
    return f"{job}/{uid}" if uid else job


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a cloud accepts as a tag."""

    name: re.Pattern[str]
    value: re.Pattern[str]
    forbidden: tuple[str, ...]
    """Prefixes of names that the cloud keeps to itself."""
    count: int
    """Most tags of one resource."""
    hint: str


_RULES = {
    # "Tag your Amazon EC2 resources", Tag restrictions.
    "aws": _Rules(
        re.compile(r"[\w .:/=+@-]{1,128}"),
        re.compile(r"[\w .:/=+@-]{0,256}"),
        ("aws:",),
        50,
        "letters, digits, spaces and . : / = + - @ _",
    ),
    # "Use tags to organize your Azure resources", Limitations.
    "azure": _Rules(
        re.compile(r"[^<>%&\\?/\x00-\x1f]{1,512}"),
        re.compile(r"[^\x00-\x1f]{0,256}"),
        ("microsoft", "azure", "windows"),
        50,
        r"names without < > % & \ ? /",
    ),
    # "Organize resources using labels", Requirements for labels.
    "gcp": _Rules(
        re.compile(r"[a-z][a-z0-9_-]{0,62}"),
        re.compile(r"[a-z0-9_-]{0,63}"),
        (),
        64,
        "lower-case letters, digits, _ and -, at most 63, names begin with a letter",
    ),
}


def check_tags(cloud: str, wanted: Mapping[str, str]) -> None:
    """Check tags of the user's by the rules of a cloud.

    Args:
        cloud: aws, azure or gcp.
        wanted: Values by name.

    Raises:
        ValueError: the cloud would refuse them, or they are ours.
    """
    rules = _RULES[cloud]
    for name, value in wanted.items():
        low = name.lower()
        reserved = (_OURS, *rules.forbidden)
        if (low == "name" and cloud == "aws") or low.startswith(reserved):
            raise ValueError(f"tags: {name} is kept for {cloud} or spottrain; choose another name")
        if not rules.name.fullmatch(name) or not rules.value.fullmatch(value):
            raise ValueError(f"tags: {cloud} allows {rules.hint}: got {name}={value}; correct it")
    if len({name.lower() for name in wanted}) < len(wanted):
        raise ValueError("tags: names that differ only in case; keep one of them")
    if len(wanted) > rules.count - _OWN_TAGS:
        raise ValueError(
            f"tags: {cloud} allows {rules.count - _OWN_TAGS} beside spottrain's own: got "
            f"{len(wanted)}; remove some"
        )
