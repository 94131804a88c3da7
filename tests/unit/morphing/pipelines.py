"""Pipelines for tests: any small one, and those that the original was run with."""

from __future__ import annotations

import csv
from pathlib import Path

from hypothesis import strategies as st

from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.simulate.replica import Link, StageTimes
from spottrain.wire.plan import ScheduleKind

kinds: st.SearchStrategy[ScheduleKind] = st.sampled_from(["varuna", "1f1b", "gpipe"])
few = st.integers(1, 6).map(lambda n: n / 1000)
"""Times that often coincide."""


def stage_times(times: st.SearchStrategy[float]) -> st.SearchStrategy[StageTimes]:
    return st.builds(StageTimes, forward_s=times, recompute_s=times, backward_s=times)


def links_of(times: st.SearchStrategy[float]) -> st.SearchStrategy[Link]:
    zero_or = st.just(0.0) | times
    return st.builds(Link, latency_s=zero_or, transfer_s=zero_or)


@st.composite
def pipelines(
    draw: st.DrawFn, times: st.SearchStrategy[float] = few, longest: int = 20
) -> tuple[Schedule, list[StageTimes], list[Link]]:
    stages = draw(st.lists(stage_times(times), min_size=1, max_size=5))
    depth = len(stages)
    links = draw(st.lists(links_of(times), min_size=depth - 1, max_size=depth - 1))
    count, recompute = draw(st.integers(1, longest)), draw(st.booleans())
    return (
        compact_schedule(draw(kinds), depth, count, recompute=recompute),
        stages,
        links,
    )


def reference_rows(folder: Path) -> list[dict[str, str]]:
    """Return what the original's simulator was asked and answered."""
    return list(csv.DictReader((folder / "varuna-simulator.csv").read_text().splitlines()))


def originals_inputs(row: dict[str, str]) -> tuple[list[StageTimes], list[Link]]:
    """Its inputs: recompute takes a forward's time, the last stage differs, a message
    within a VM takes less than one between VMs."""
    depth, per_vm = int(row["P"]), int(row["gpus_per_vm"])
    us = {key: int(row[key]) * 1e-6 for key in row if key.endswith("_us")}
    stages = [
        StageTimes(
            forward_s=us[f"{which}fwd_us"],
            recompute_s=us[f"{which}fwd_us"],
            backward_s=us[f"{which}bwd_us"],
        )
        for which in [""] * (depth - 1) + ["last_"]
    ]
    links = [
        Link(latency_s=us["send_us" if p // per_vm == (p + 1) // per_vm else "long_send_us"])
        for p in range(depth - 1)
    ]
    return stages, links
