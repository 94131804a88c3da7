"""Catalogue of the clouds' machines: facts with sources, shipped with the package.

Of prices it has only dated lists, to show something before any cloud was queried: on
demand, and estimates of spot prices, which nothing is rented by.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from spottrain.errors import ConfigError
from spottrain.suggest import did_you_mean
from spottrain.units import MONTH_H

DATA = Path(__file__).parent / "data"
MIB_BYTES, GIB_BYTES = 2**20, 2**30
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
CLOUDS = ("aws", "azure", "gcp")
LOSSES_PER_DAY = 1.2
"""Interruptions of one spot VM that are planned with where even its GPU is not known, and
by replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource:
    """Where a fact was published."""

    title: str
    date: str
    """Year, month and, where known, day: 2026-07-20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLink:
    """What joins the GPUs of a VM."""

    name: str
    """NVLink or PCIe."""
    bytes_per_s: float
    """Published, each way, between any two of them: all of a GPU's NVLinks where there is an
    NVSwitch, one of those of a V100, which form a mesh. PCIe has 16 lanes."""
    share: float
    """Of it that NCCL reaches with large messages and sums."""
    share_source: FactSource
    """Where that was published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """A kind of GPU; of machines without GPUs, one of their cores."""

    name: str
    memory_bytes: int
    """As the driver reports it; of a core, its share of the machine's."""
    compute_capability: int = 0
    """Ten times major plus minor, such as 86; 0: a CPU."""
    peak_flops: Mapping[str, float]
    """Published peak FLOP/s by precision (of PRECISIONS), without sparsity; unpublished
    ones are absent. Of a core: its clock times what its vector units do in a cycle."""
    memory_bytes_per_s: float = 0.0
    """Published bandwidth of its memory; 0 of a core."""
    link: GpuLink | None = None
    """To other GPUs of its VM; None: a core."""
    tdp_w: float = 0.0
    """Thermal design power; 0 of a core."""
    matmul_share: float = 1.0
    """Share of the peak that large matrix multiplications sustain within that power."""
    share_source: FactSource | None = None
    """Where that share was measured, or by which class of power it is assumed."""
    training_share: float = 1.0
    """Share of its roofline that whole training steps reach, see ``gpu_speed.seconds``; one
    figure for each compute capability."""
    training_source: FactSource | None = None
    """The published run that it is from, or why it is assumed."""
    losses_per_day: float = LOSSES_PER_DAY
    """Interruptions of one spot VM to expect where nothing else is known; one figure for each
    compute capability."""
    losses_source: FactSource | None = None
    """Where that is from."""
    source: FactSource

    def may_be(self, device: str) -> bool:
        """Return whether a driver's or a profile's name may be that of this GPU or CPU: all words
        of its own are in it."""
        return _words(self.name) <= _words(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """A kind of machine that a cloud rents."""

    cloud: str
    name: str
    gpu: GpuType
    """What its workers compute on."""
    gpus: int
    """How many of these: GPUs, or cores, which have two virtual CPUs each."""
    vcpus: int
    memory_bytes: int
    network_bytes_per_s: float | None
    """Between machines, as published; None: not published."""
    network_baseline_bytes_per_s: float | None
    """What remains of it after a while, where the cloud says "up to"; None: all of it."""
    local_ssd_gib: int
    """Local disks that come with it and are billed separately."""
    source: FactSource

    @property
    def sustained_bytes_per_s(self) -> float | None:
        """Bandwidth between machines that lasts; None: not published."""
        return self.network_baseline_bytes_per_s or self.network_bytes_per_s

    @property
    def device(self) -> Literal["gpu", "cpu"]:
        """What its workers compute on."""
        return "gpu" if self.gpu.compute_capability else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPrice:
    """A price that ships with the package."""

    cloud: str
    region: str
    instance_type: str
    spot: bool
    """An estimate then: spot prices change by the hour."""
    usd_per_hour: float
    published_at: float
    """Seconds since the epoch."""
    source: FactSource


class Catalogue:
    """The facts, read once."""

    def __init__(self) -> None:
        self.sources = {
            row["source"]: FactSource(title=row["title"], date=row["date"])
            for row in self._rows("sources")
        }
        self._links = {row["link"]: row for row in self._rows("links")}
        by_class = [
            {row["compute_capability"]: row for row in self._rows(name)}
            for name in ("training", "losses")
        ]
        self.gpus = {
            row["gpu"]: self._gpu(row, *(rows[row["compute_capability"]] for rows in by_class))
            for row in self._rows("gpus")
        }
        self.cpus = {row["cpu"]: self._core(row) for row in self._rows("cpus")}
        types = (
            *map(self._type, self._rows("instances")),
            *map(self._cpu_type, self._rows("cpu_instances")),
        )
        self.types = {(kind.cloud, kind.name): kind for kind in types}
        """By cloud and name."""

    def find(self, cloud: str, instance_type: str) -> InstanceType | None:
        """Return one type, None if it is not known."""
        return self.types.get((cloud, instance_type))

    def gpu_of(self, device: str) -> GpuType | None:
        """Return the GPU or CPU with a driver's or a profile's name, None if it is not known.

        Such as ``NVIDIA A100-SXM4-80GB``: of those whose words are all in the name, the one
        with most words.
        """
        known = (*self.gpus.values(), *self.cpus.values())
        fitting = [gpu for gpu in known if gpu.may_be(device)]
        return max(fitting, key=lambda gpu: len(_words(gpu.name)), default=None)

    def matching(
        self,
        *,
        gpus: Collection[str] = (),
        clouds: Collection[str] = (),
        names: Collection[str] = (),
    ) -> tuple[InstanceType, ...]:
        """Return the types that fit; an empty filter fits all that have GPUs.

        Args:
            gpus: Names, such as ``A100`` (with all its sizes) or ``A100-80GB``; case
                does not count.
            clouds: Of CLOUDS.
            names: Of instance types.

        Raises:
            ConfigError: a name that nothing in the catalogue has.
        """
        for gpu in gpus:
            if not any(_fits(gpu, known) for known in self.gpus):
                hint = did_you_mean(gpu, self.gpus) or f"take one of {', '.join(self.gpus)}"
                raise ConfigError(f"no such GPU: got {gpu}; {hint}")
        for cloud in clouds:
            if cloud not in CLOUDS:
                raise ConfigError(f"no such cloud: got {cloud}; take one of {', '.join(CLOUDS)}")
        known = {kind.name for kind in self.types.values()}
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known) or "'spottrain prices' lists them"
                raise ConfigError(f"no such instance type in the catalogue: got {name}; {hint}")
        return tuple(
            kind
            for kind in self.types.values()
            if (not clouds or kind.cloud in clouds)
            and (kind.name in names if names else kind.device == "gpu")
            and (not gpus or any(_fits(gpu, kind.gpu.name) for gpu in gpus))
        )

    def published(self) -> Iterator[PublishedPrice]:
        """Yield the prices that ship with the package, on demand and spot."""
        for name in ("on_demand", "spot"):
            for row in self._rows(name):
                source = self.sources[row["source"]]
                day = datetime.fromisoformat(source.date).replace(tzinfo=UTC)
                yield PublishedPrice(
                    cloud=row["cloud"],
                    region=row["region"],
                    instance_type=row["instance_type"],
                    spot=name == "spot",
                    usd_per_hour=float(row["usd_per_hour"]),
                    published_at=day.timestamp(),
                    source=source,
                )

    def bands(self) -> dict[tuple[str, str, str], int]:
        """Return the published interruption bands, see hazard.BANDS.

        By cloud, region and instance type.
        """
        return {
            (row["cloud"], row["region"], row["instance_type"]): int(row["band"])
            for row in self._rows("interruptions")
        }

    def regions(self, cloud: str) -> set[str]:
        """Return the regions of a cloud that any published price or band is of."""
        tables = ("on_demand", "spot", "interruptions")
        rows = (row for name in tables for row in self._rows(name))
        return {row["region"] for row in rows if row["cloud"] == cloud}

    def attached_usd_per_hour(self, cloud: str, disk_gib: int, *, public_address: bool) -> float:
        """Return the list price of a VM's disk and public address in a US region.

        Azure bills a disk as the next larger size that it has: a power of two.

        Args:
            cloud: Of the machine; 0 if nothing is published for it.
        """
        for row in self._rows("attached"):
            if row["cloud"] == cloud:
                gib = disk_gib if cloud != "azure" else 1 << (disk_gib - 1).bit_length()
                disk_usd = gib * float(row["disk_usd_per_gib_month"]) / MONTH_H
                address_usd = float(row["address_usd_per_hour"]) * public_address
                return round(disk_usd + address_usd, 9)
        return 0.0

    def _rows(self, name: str) -> Iterator[dict[str, str]]:
        path = DATA / f"{name}.csv"
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)

    def _gpu(
        self, row: Mapping[str, str], training: Mapping[str, str], losses: Mapping[str, str]
    ) -> GpuType:
        peaks = {name: row[f"{name}_tflops"] for name in PRECISIONS}
        return GpuType(
            name=row["gpu"],
            memory_bytes=int(row["memory_mib"]) * MIB_BYTES,
            compute_capability=int(row["compute_capability"]),
            peak_flops={k: float(v) * 1e12 for k, v in peaks.items() if v},
            memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
            link=self._link(row["link"], float(row["link_gb_per_s"]) * 1e9),
            tdp_w=float(row["tdp_w"]),
            matmul_share=float(row["matmul_share"]),
            share_source=self.sources[row["share_source"]],
            training_share=float(training["share"]),
            training_source=self.sources[training["source"]],
            losses_per_day=float(losses["losses_per_day"]),
            losses_source=self.sources[losses["source"]],
            source=self.sources[row["source"]],
        )

    def _link(self, name: str, bytes_per_s: float) -> GpuLink:
        row = self._links[name]
        return GpuLink(
            name=name,
            bytes_per_s=bytes_per_s,
            share=float(row["share"]),
            share_source=self.sources[row["source"]],
        )

    def _type(self, row: Mapping[str, str]) -> InstanceType:
        return InstanceType(
            cloud=row["cloud"],
            name=row["instance_type"],
            gpu=self.gpus[row["gpu"]],
            gpus=int(row["gpus"]),
            vcpus=int(row["vcpus"]),
            memory_bytes=int(float(row["memory_gib"]) * GIB_BYTES),
            network_bytes_per_s=_bytes_per_s(row["network_gbps"]),
            network_baseline_bytes_per_s=_bytes_per_s(row["network_baseline_gbps"]),
            local_ssd_gib=int(row["local_ssd_gib"] or 0),
            source=self.sources[row["source"]],
        )

    def _core(self, row: Mapping[str, str]) -> GpuType:
        return GpuType(
            name=row["cpu"],
            memory_bytes=0,
            peak_flops={"fp32": float(row["fp32_gflops_per_core"]) * 1e9},
            source=self.sources[row["source"]],
        )

    def _cpu_type(self, row: Mapping[str, str]) -> InstanceType:
        """Return a machine without GPUs: a worker per core, not per virtual CPU.

        The two virtual CPUs of a core share its vector units.
        """
        vcpus = int(row["vcpus"])
        memory_bytes = int(float(row["memory_gib"]) * GIB_BYTES)
        cores = vcpus // 2
        share_bytes = memory_bytes // cores
        return InstanceType(
            cloud=row["cloud"],
            name=row["instance_type"],
            gpu=replace(self.cpus[row["cpu"]], memory_bytes=share_bytes),
            gpus=cores,
            vcpus=vcpus,
            memory_bytes=memory_bytes,
            network_bytes_per_s=_bytes_per_s(row["network_gbps"]),
            network_baseline_bytes_per_s=_bytes_per_s(row["network_baseline_gbps"]),
            local_ssd_gib=0,
            source=self.sources[row["source"]],
        )


def _bytes_per_s(gbps: str) -> float | None:
    return float(gbps) * 1e9 / 8 if gbps else None


@functools.cache
def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[^A-Z0-9]+", name.upper()))


def _fits(asked: str, name: str) -> bool:
    asked, name = asked.upper(), name.upper()
    return name == asked or name.startswith(f"{asked}-")


@functools.cache
def catalogue() -> Catalogue:
    """Return the catalogue that ships with the package."""
    return Catalogue()
