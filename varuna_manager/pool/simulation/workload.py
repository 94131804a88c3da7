"""Jobs that arrive on a pool, and the formats that they are read from.

Gavel's traces (Narayanan's dissertation, section 5.7.1) give each job a type, its steps and a
fixed number of workers; a table beside them has the steps per second of a type on so many
workers of a kind. The measured steps are of the batch that one worker has, so that at twice the
workers a step per second is as many examples as before.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
)

from spottrain.errors import ConfigError
from spottrain.pricing.sharing.problem import hull
from spottrain.units import DAY_S
from spottrain.varuna_manager.config.files import explain
from spottrain.varuna_manager.config.pool import Weight

Table = Mapping[int, float]
"""Throughput by number of VMs."""
Measured = Mapping[tuple[str, str, int], float]
"""(kind, type of job, VMs): steps per second."""

_COLUMNS = 10
_LONGEST_S = 10 * 365 * DAY_S
"""Of what is simulated: longer is a slip of the pen, and takes for ever."""
PointInTime = Annotated[float, Field(ge=0, le=_LONGEST_S)]
Size = Annotated[int, Field(gt=0, le=100_000)]
_TYPE = re.compile(r"(?P<model>.*) \(batch size (?P<batch>\d+)\)")


class _Written(BaseModel):
    """What people write; numbers may be text."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Row(_Written):
    """The numbers of a row of Gavel's traces."""

    steps: PositiveFloat
    workers: Size
    priority: Weight
    slo: float
    arrival: PointInTime


class _Job(_Written):
    """A job of our own format."""

    name: str = Field(min_length=1)
    arrived_s: PointInTime = 0.0
    work: PositiveFloat
    size: Size
    throughputs: dict[str, dict[Size, NonNegativeFloat]]
    weight: Weight = 1.0
    deadline_s: PositiveFloat | None = None
    team: str = ""


class _Workload(_Written):
    jobs: list[_Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """One job of a workload; points in time are seconds since its start."""

    name: str
    arrived_s: float
    work: float
    """In the unit of its throughputs."""
    size: int
    """VMs that it asks for; what it has at all times where sizes are fixed."""
    throughputs: tuple[Table, ...]
    """By kind, as measured; empty where it cannot run."""
    weight: float = 1.0
    deadline_s: float = math.inf
    """Point in time."""
    team: str = ""

    def __post_init__(self) -> None:
        """Check its length.

        Raises:
            ConfigError: It takes for ever.
        """
        rates = (rate for table in self.throughputs for rate in table.values())
        best = max(rates, default=0.0)
        if best and self.work / best > _LONGEST_S:
            raise ConfigError(
                f"{self.name}: takes more than 10 years at its highest throughput, "
                f"{best:g}: got {self.work:g} of work; give less, or check the unit"
            )

    def fixed(self) -> tuple[Table, ...]:
        """Return its throughputs at its own size only."""
        return tuple(
            {self.size: table[self.size]} if table.get(self.size) else {}
            for table in self.throughputs
        )

    def elastic(self) -> tuple[Table, ...]:
        """Return its throughputs at every number of VMs, by concave hulls.

        Between two corners is what lies on the line between them: less than a concave
        throughput has there.
        """
        return tuple(map(_filled, self.throughputs))


def _filled(table: Table) -> Table:
    corners = hull(table)
    if not corners:
        return {}
    sizes, rates = zip(*corners, strict=True)
    every = range(sizes[0], sizes[-1] + 1)
    return dict(zip(every, np.interp(every, sizes, rates).tolist(), strict=True))


def read_throughputs(text: str) -> Measured:
    """Return measured throughputs.

    Args:
        text: CSV with the columns ``worker_type,job_type,scale_factor,steps_per_s``, or
            Gavel's JSON of throughputs, of which those in isolation are taken.

    Raises:
        ConfigError: another format; one line.
    """
    try:
        if text.lstrip().startswith("{"):
            return dict(_of_json(json.loads(text)))
        rows = csv.DictReader(io.StringIO(text))
        return {
            (row["worker_type"], row["job_type"], int(row["scale_factor"])): float(
                row["steps_per_s"]
            )
            for row in rows
        }
    except (KeyError, TypeError, ValueError, SyntaxError, AttributeError) as error:
        raise ConfigError(
            f"throughputs: got {type(error).__name__}: {error}; give CSV with the columns "
            "worker_type,job_type,scale_factor,steps_per_s, or Gavel's JSON"
        ) from error


def _of_json(
    document: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> Iterator[tuple[tuple[str, str, int], float]]:
    for kind, rows in document.items():
        for key, against in rows.items():
            job_type, size = literal_eval(key) if key.startswith("(") else (key, 1)
            yield (kind, job_type, int(size)), float(against["null"])


def read_gavel(text: str, measured: Measured, kinds: Sequence[str]) -> list[SimulatedJob]:
    """Return the jobs of one of Gavel's traces.

    Columns, by tabs: type, command, directory, option of the steps, needs data, steps, workers,
    priority, SLO in times what it takes on the fastest kind (-1 for none), arrival in seconds.

    Raises:
        ConfigError: another format, or a job that was measured on no kind; one line.
    """
    jobs: list[SimulatedJob] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) != _COLUMNS:
            raise ConfigError(
                f"trace, line {number}: got {len(cells)} columns; give {_COLUMNS}, "
                "separated by tabs, as Gavel's traces have them"
            )
        try:
            row = _Row.model_validate(dict(zip(_Row.model_fields, cells[5:], strict=True)))
        except ValidationError as error:
            raise ConfigError(f"trace, line {number}: {explain(error, _Row)}") from error
        job = gavel_job(
            f"job{len(jobs)}",
            cells[0],
            size=row.workers,
            measured=measured,
            kinds=kinds,
            arrived_s=row.arrival,
            work=row.steps,
            weight=row.priority,
            slo=row.slo,
        )
        jobs.append(job)
    return jobs


def gavel_job(
    name: str,
    job_type: str,
    *,
    size: int,
    measured: Measured,
    kinds: Sequence[str],
    arrived_s: float,
    work: float,
    weight: float = 1.0,
    slo: float = -1.0,
) -> SimulatedJob:
    """Return a job of one of Gavel's types.

    Raises:
        ConfigError: it was measured on no kind at its size.
    """
    throughputs = tuple(_table(job_type, size, kind, measured) for kind in kinds)
    best = max((table.get(size, 0.0) for table in throughputs), default=0.0)
    if best <= 0:
        raise ConfigError(
            f"{name}: no throughput of {job_type} on {size} workers of "
            f"{', '.join(kinds)}; add it to the throughputs"
        )
    deadline_s = arrived_s + slo * work / best if slo > 0 else math.inf
    return SimulatedJob(
        name=name,
        arrived_s=arrived_s,
        work=work,
        size=size,
        throughputs=throughputs,
        weight=weight,
        deadline_s=deadline_s,
    )


def _table(job_type: str, size: int, kind: str, measured: Measured) -> Table:
    """Return what a job of so many workers trains on each number of them, its batch constant.

    On fewer workers each has the same batch several times; on more, a smaller one, which is
    a type of its own in the measurements.
    """
    table = {}
    for n in _sizes(job_type, kind, measured, at_most=size):
        table[n] = measured[kind, job_type, n]
    if not (found := _TYPE.fullmatch(job_type)):
        return {n: rate for n, rate in table.items() if rate > 0}
    more = size * 2
    while (batch := int(found["batch"]) * size / more) >= 1:
        smaller = f"{found['model']} (batch size {batch:g})"
        if (rate := measured.get((kind, smaller, more))) is None:
            break
        table[more] = rate * size / more
        more *= 2
    return {n: rate for n, rate in table.items() if rate > 0}


def _sizes(job_type: str, kind: str, measured: Measured, at_most: int) -> Iterable[int]:
    sizes = {1, 2, 4, 8, 16, at_most}
    return sorted(n for n in sizes if n <= at_most and (kind, job_type, n) in measured)


def read_jobs(text: str, kinds: Sequence[str]) -> list[SimulatedJob]:
    """Return the jobs of a JSON file of our own.

    ``{"jobs": [{"name", "arrived_s", "work", "size", "throughputs": {kind: {VMs: rate}},
    "weight", "deadline_s", "team"}]}``, the last three as wanted.

    Raises:
        ConfigError: another format; one line.
    """
    try:
        found = _Workload.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"trace: {explain(error, _Workload)}; docs/pool.md has the format"
        ) from error
    jobs = [
        SimulatedJob(
            throughputs=tuple(
                {n: rate for n, rate in one.throughputs.get(kind, {}).items() if rate}
                for kind in kinds
            ),
            **one.model_dump(exclude={"throughputs"}, exclude_none=True),
        )
        for one in found.jobs
    ]
    if len({job.name for job in jobs}) < len(jobs):
        raise ConfigError("trace: got two jobs of one name; give each its own")
    return jobs
