"""What an adapter needs to be told about the kinds of machines, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from spottrain.cloud.port.errors import MisconfiguredError


class GpuFacts(Protocol):
    """A kind of GPU."""

    @property
    def memory_bytes(self) -> int:
        """Memory of one."""


class MachineFacts(Protocol):
    """A kind of machine."""

    @property
    def gpu(self) -> GpuFacts:
        """Its GPUs are alike."""

    @property
    def gpus(self) -> int:
        """How many it has."""


class CloudFacts(Protocol):
    """Knows the kinds of machines; ``pricing.catalogue.Catalogue`` is one."""

    def find(self, cloud: str, instance_type: str) -> MachineFacts | None:
        """Return a kind of machine, None if it is not known."""


def check_types(
    facts: CloudFacts, cloud: str, title: str, names: Iterable[str]
) -> None:
    """Refuse kinds of machines that nothing is known of.

    Args:
        facts: Who knows.
        cloud: Whose kinds they are, as ``facts`` names it.
        title: The same for people.
        names: The kinds.

    Raises:
        MisconfiguredError: some are not known.
    """
    unknown = [name for name in names if facts.find(cloud, name) is None]
    if unknown:
        raise MisconfiguredError(
            f"{title}: instance types that the catalogue does not know: {unknown}"
        )


OnDemandPrice = Callable[[str, str], float | None]
"""(region, instance type) -> USD per hour, None where it is not known."""
