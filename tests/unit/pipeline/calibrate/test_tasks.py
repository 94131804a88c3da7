from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.timed import Figures, TimedDevice
from tests.gpu import runs
from tests.gpu.forked import Child, Say, start_store

from spottrain.pipeline.calibrate.calibrate import even_shares
from spottrain.pipeline.calibrate.sections import SectionBench
from spottrain.pipeline.calibrate.tasks import (
    BUDGET_S,
    MAX_S,
    Chain,
    TimedLinks,
    microbatches_for,
    summarise_overheads,
    time_tasks,
)
from spottrain.pipeline.comm.collectives import gather_json
from spottrain.pipeline.comm.groups import connect_rendezvous, join, leave
from spottrain.pipeline.model.loaded import load
from spottrain.wire.model import LoaderSpec


@given(st.integers(1, 130), st.floats(0, 100))
def test_timing_tasks_stays_within_its_bound(depth: int, slowest_s: float) -> None:
    count = microbatches_for(depth, slowest_s)
    took_s = 2 * (count + depth - 1) * slowest_s
    assert count == 0 or took_s <= MAX_S
    if count > 2:
        assert took_s <= BUDGET_S * (1 + 1e-9)


@given(st.integers(1, 130), st.floats(0, 1), st.floats(0, 1))
def test_slower_stages_are_timed_over_fewer_micro_batches(
    depth: int, one_s: float, other_s: float
) -> None:
    slow_s, fast_s = max(one_s, other_s), min(one_s, other_s)
    assert microbatches_for(depth, slow_s) <= microbatches_for(depth, fast_s)


def test_a_chains_ranks_are_neighbours_in_their_order() -> None:
    ranks = (0, 2, 5)
    found = [Chain(ranks, place).neighbours for place in range(3)]
    assert found == [(None, 2), (0, 5), (2, None)]
    assert Chain((3,), 0).neighbours == (None, None)


def test_kinds_of_tasks_are_summed_up_over_stages_by_medians() -> None:
    stages = [
        {
            "forward": [3e-4, 5e-4, 9.0],
            "recompute": [1e-4],
            "backward": [2e-4],
            "posting": [6e-5],
        },
        {"forward": [4e-4], "recompute": [], "backward": [2e-4], "posting": [4e-5]},
        {},
    ]
    beside = summarise_overheads(stages, 1e-5, LoaderSpec(workers=0))
    assert beside is not None
    assert beside.forward_s == pytest.approx(4.5e-4 + 1e-5)
    assert beside.recompute_s == pytest.approx(1e-4 + 1e-5)
    assert beside.backward_s == pytest.approx(2e-4)
    assert beside.posting_s == pytest.approx(5e-5)
    assert 0 < beside.deviation_s < 1e-3


def test_without_recomputes_a_recompute_is_taken_for_a_backward() -> None:
    alone = {"forward": [3e-4], "recompute": [], "backward": [2e-4], "posting": []}
    beside = summarise_overheads([alone], 1e-5, LoaderSpec(workers=0))
    assert beside is not None
    assert beside.recompute_s == pytest.approx(2e-4 + 1e-5)
    assert beside.posting_s == 0.0


def test_nothing_measured_is_nothing_known() -> None:
    assert summarise_overheads([{}, {}], 1e-5, LoaderSpec(workers=0)) is None


@pytest.mark.parametrize(
    ("loader", "forward_s", "fetch_s"),
    [
        (LoaderSpec(workers=0), 0.3, 0.0),
        (LoaderSpec(workers=2), 0.1, 0.1),
        (LoaderSpec(), 0.1, 0.05),
        (LoaderSpec(ahead=1), 0.1, 0.2),
    ],
)
def test_examples_count_in_forwards_unless_loaders_make_them(
    loader: LoaderSpec, forward_s: float, fetch_s: float
) -> None:
    samples = {"forward": [0.1], "backward": [0.1], "fetching": [0.2]}
    beside = summarise_overheads([samples], 0.0, loader, num_microbatches=8)

    assert beside is not None
    assert beside.forward_s == pytest.approx(forward_s)
    assert beside.fetch_s == pytest.approx(fetch_s)


def test_workers_make_what_costs_next_to_nothing_themselves() -> None:
    samples = {"forward": [0.1], "backward": [0.1], "fetching": [1e-4]}
    beside = summarise_overheads([samples], 0.0, LoaderSpec(), num_microbatches=8)

    assert beside is not None
    assert beside.forward_s == pytest.approx(0.1001)
    assert beside.fetch_s == 0.0


FIGURES = Figures.of("T4").slowed(4000.0)
"""Of the stand-in for a GPU: a task takes it tens of milliseconds of virtual time, and the
host microseconds."""


def _stage(folder: Path, rank: int, size: int, port: int, say: Say) -> None:
    """Time tasks as one stage of a pipeline; rank 0 tells the overheads of all."""
    torch.set_num_threads(1)
    loaded = load(runs.job_spec(folder, "tiny"), runs.WORKDIR)
    store = connect_rendezvous("127.0.0.1", port, 300.0)
    join(store, "tasks", rank, size, 300.0)
    device = TimedDevice(FIGURES)
    share = even_shares(loaded.layout.num_sections, size)[rank]
    bench = SectionBench(loaded, share, "", device)
    chain = Chain(tuple(range(size)), rank)
    links = TimedLinks(*chain.neighbours, device)
    with device.using(), bench.training() as memory:
        samples = time_tasks(loaded, bench, memory, chain, links, 2, 8)
    links.close()
    every = gather_json(samples)
    found = summarise_overheads(every, 0.0, LoaderSpec(workers=0))
    assert found is not None
    say(asdict(found))
    leave()


@pytest.mark.rotated
def test_waiting_for_the_device_is_nobodys_overhead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, port = start_store()
    stages = [
        Child(lambda say, rank=rank: _stage(tmp_path, rank, 3, port, say))  # type: ignore[misc]
        for rank in range(3)
    ]
    found = stages[0].hear(600)
    for child in (*stages, store):
        child.close()

    tasks = [found[kind] for kind in ("forward_s", "recompute_s", "backward_s")]
    assert max(tasks) < 1e-3
