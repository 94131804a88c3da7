"""Calibration, planner and run agree over a stand-in for a GPU whose times are declared.

All times are virtual: how fast this machine is does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.builders import a_plan, slots_of
from tests.fakes.timed import CONTEXT_BYTES, Figures, TimedDevice
from tests.fakes.timed_links import Board, TimedLinks, Wire
from tests.gpu import runs
from tests.gpu.forked import Child, Say, start_store

from spottrain.morphing.simulate.compute import Compute
from spottrain.morphing.simulate.simulator import expect_step
from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.calibrate.calibrate import calibrate
from spottrain.pipeline.calibrate.sections import PrivateMemory
from spottrain.pipeline.comm.collectives import gather_json
from spottrain.pipeline.comm.device_group import DeviceGroups
from spottrain.pipeline.comm.groups import connect_rendezvous, join, leave
from spottrain.pipeline.comm.ranks import neighbours
from spottrain.pipeline.loader.prefetch import Prefetcher
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.pipeline.state import update
from spottrain.pipeline.state.agreement import fold
from spottrain.pipeline.state.context import SupervisorPort, WorkerContext
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.train.lanes import Lanes
from spottrain.pipeline.train.sharing import Network, StageSections
from spottrain.storage.open import open_store
from spottrain.wire.messages import Calibrate
from spottrain.wire.model import LinkProfile, Profile, StateHome
from spottrain.wire.plan import Plan

WITHIN = 0.03
"""Share by which a prediction may be wrong."""
SLOWER = 4000.0
"""With it the tiny model's sections take the T4 as long as those of a real one."""
FIGURES = replace(Figures.of("T4").slowed(SLOWER), memory_bytes=CONTEXT_BYTES + (1 << 28))
WIRE = Wire(latency_s=1e-4, bytes_per_s=1e8)
MICROBATCHES = 8
MINIBATCHES = 2
"""The first one is a warm-up: it watches every operation."""


def loaded_job(folder: Path) -> LoadedJob:
    spec = runs.job_spec(
        folder, "untied", reduction="fast", minibatch_size=2 * MICROBATCHES, microbatch_size=2
    )
    return load(spec, runs.WORKDIR)


def measured(loaded: LoadedJob) -> Profile:
    """Calibrate on one device; the link is as declared, from device to device."""
    command = Calibrate(microbatch_sizes=(2,))
    device = TimedDevice(FIGURES)
    profile = calibrate(loaded, command, 0, lambda report: None, device, "a GPU")
    assert profile is not None
    s_per_byte = (
        1 / WIRE.bytes_per_s + 1 / profile.upload_bytes_per_s + 1 / profile.download_bytes_per_s
    )
    link = LinkProfile(latency_s=WIRE.latency_s, bandwidth_bytes_per_s=1 / s_per_byte)
    return replace(profile, within_vm=link, between_vms=link)


class Stage:
    """One rank of a plan: the product's lanes and commit, in declared time."""

    def __init__(
        self, loaded: LoadedJob, plan: Plan, rank: int, board: Board, port: int, device: TimedDevice
    ) -> None:
        store = connect_rendezvous("127.0.0.1", port, 600.0)
        connections = join(store, "stages", rank, plan.pipeline_depth, 600.0)
        memory = SlotMemory(PrivateMemory(), loaded.job, loaded.specs, device)
        memory.move_home(plan.state)
        memory.hold(plan.sections_of(rank))
        context = WorkerContext(
            loaded,
            f"vm{rank}",
            0,
            device,
            memory,
            open_store(loaded.spec.checkpoint_path),
            cast(SupervisorPort, None),
            FaultScript(),
            cast(Prefetcher, None),
        )
        network = Network(store, connections, {}, DeviceGroups(device, connections, print, print))
        self.device, self.board, self.rank = device, board, rank
        self.arenas = memory.arenas
        stage = StageSections(context, plan, rank, network)
        self.lanes = Lanes(context, plan, rank, stage, network, TensorTracker(memory.num_bytes))
        self.links = TimedLinks(*neighbours(plan, rank), device, board, rank, WIRE)
        sizes = plan.minibatch_size, plan.microbatch_size
        source = MicrobatchSource(loaded.job, loaded.spec.seed, *sizes)
        self.lanes.connect(source, self.links)
        self.updater = memory.updater(self.arenas, FaultScript())
        self.gatherer = update.Gatherer(plan)

    def agree(self) -> float:
        """Return the latest time of any rank; this one goes on then."""
        self.device.synchronise()
        now_s: float = max(gather_json(self.device.clock()))
        self.device.time.hold(now_s)
        return now_s

    def minibatch(self, step: int) -> float:
        """Train one; return its time."""
        began_s = self.agree()
        with self.board.playing(self.rank, began_s):
            computed = self.lanes.finish(step, self.lanes.open(step), began_s)
        reduction = self.lanes.of(step).reduction
        fits = reduction.reduce()
        totals = reduction.total_loss(computed.losses)
        last = max(k for k in self.arenas)
        mine = update.contributions(self.arenas.values(), (), {last: totals}, fits)
        self.agree()
        everything = self.gatherer.exchange(mine, 0, 0, 0, 0, save=False)
        decision = fold(1, step, everything.contributions, False)
        for section in self.arenas:
            self.updater.apply(decision, [section], self.lanes.refresh)
        return self.agree() - began_s


def _run(folder: Path, plan: Plan, rank: int, board: Board, port: int, say: Say) -> None:
    torch.set_num_threads(1)
    device = TimedDevice(FIGURES)
    with device.using():
        stage = Stage(loaded_job(folder), plan, rank, board, port, device)
        times_s = [stage.minibatch(step) for step in range(MINIBATCHES)]
    stage.links.flush()
    stage.links.close()
    say({"step_s": times_s[-1], "peak": device.peak_bytes()})
    leave()


def trained_s(folder: Path, plan: Plan) -> float:
    """Return the time of a mini-batch of a pipeline of real processes."""
    board = Board(plan.pipeline_depth)
    store, port = start_store()

    def stage(rank: int) -> Callable[[Say], None]:
        return lambda say: _run(folder, plan, rank, board, port, say)

    ranks = [Child(stage(rank)) for rank in range(plan.pipeline_depth)]
    found: list[dict[str, Any]] = [child.hear(600.0) for child in ranks]
    for child in (*ranks, store):
        child.close()
    return max(float(one["step_s"]) for one in found)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    torch.set_num_threads(1)
    return measured(loaded_job(tmp_path_factory.mktemp("job")))


ROTATED = pytest.mark.rotated


@pytest.mark.parametrize(
    ("depth", "state"),
    [
        (2, "device"),
        pytest.param(4, "device", marks=ROTATED),
        pytest.param(1, "device", marks=ROTATED),
        pytest.param(1, "host", marks=ROTATED),
    ],
)
def test_what_calibration_predicts_is_what_a_run_takes(
    depth: int,
    state: StateHome,
    profile: Profile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    loaded = loaded_job(tmp_path)
    plan = a_plan(
        depth,
        num_sections=loaded.layout.num_sections,
        virtual_nodes=MICROBATCHES,
        microbatch_size=2,
        slots=slots_of("abcd"[:depth]),
        state=state,
    )
    facts = model_facts(loaded.job, loaded.layout)
    expected = expect_step(plan, profile, facts, reduction="fast", compute=Compute(on_gpu=True))

    took_s = trained_s(tmp_path, plan)

    print(f"{depth} stages, {state}: expected {expected.step_s:.4f} s, took {took_s:.4f} s")  # noqa: T201
    assert expected.step_s == pytest.approx(took_s, rel=WITHIN)
