"""Ranks on stand-ins whose times are declared, each in a process of its own, in virtual time: the
product's calibration, or its lanes, sums and commit under a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from tests.builders import slots_of
from tests.fakes.timed import Figures, TimedDevice
from tests.fakes.timed_links import Board, TimedLinks, Wire
from tests.gpu.forked import Child, Say, start_store

from spottrain.codec import from_data, to_data
from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.calibrate.calibrate import calibrate
from spottrain.pipeline.calibrate.sections import PrivateMemory
from spottrain.pipeline.comm.collectives import gather_json
from spottrain.pipeline.comm.device_group import DeviceGroups, Endpoint
from spottrain.pipeline.comm.groups import connect_rendezvous, join, leave, new_groups, world
from spottrain.pipeline.comm.ranks import memberships, neighbours, tie_groups
from spottrain.pipeline.loader.prefetch import Prefetcher
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.state import update
from spottrain.pipeline.state.agreement import fold
from spottrain.pipeline.state.context import SupervisorPort, WorkerContext
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.train.lanes import Lanes
from spottrain.pipeline.train.reduction import sum_tied
from spottrain.pipeline.train.sharing import Network, StageSections
from spottrain.storage.open import open_store
from spottrain.wire.messages import Calibrate
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan

TIMEOUT_S = 1800.0
MINIBATCHES = 2
"""The first one is a warm-up: it watches every operation."""


def calibrated_together(
    loaded: LoadedJob,
    figures: Figures,
    ranks: int,
    *,
    tensor_sizes: tuple[int, ...],
    microbatch_sizes: tuple[int, ...] = (),
    numbers: bool = True,
) -> Profile:
    """Calibrate on devices of one VM, which divide matrices, too.

    What the profile says of links, and of sums in the host's memory, is not declared.

    Args:
        loaded: The job.
        figures: Of each device.
        ranks: How many there are.
        tensor_sizes: Numbers of them that divide matrices.
        microbatch_sizes: As for ``Calibrate``.
        numbers: As for ``TimedDevice``.
    """
    store, port = start_store()
    command = Calibrate(
        participants=slots_of("a" * ranks),
        store_host="127.0.0.1",
        store_port=port,
        microbatch_sizes=microbatch_sizes,
        tensor_sizes=tensor_sizes,
    )

    def measure(rank: int, say: Say) -> None:
        torch.set_num_threads(1)
        device = TimedDevice(figures, numbers=numbers)
        found = calibrate(loaded, command, rank, lambda report: None, device, "a GPU")
        say({} if found is None else to_data(found))

    children = [Child(partial(measure, rank)) for rank in range(ranks)]
    try:
        found, *_ = (child.hear(TIMEOUT_S) for child in children)
    finally:
        for child in (*children, store):
            child.close()
    profile: Profile = from_data(Profile, found)
    return profile


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The last mini-batch of a plan, and what its ranks took."""

    step_s: float
    peak_bytes: int
    """Of the device that took most."""
    spent: Mapping[str, float]
    """Share of that time that devices spent on what ``TimedDevice.spent_s`` names, on average."""


def trained(
    loaded: LoadedJob, plan: Plan, figures: Figures, wire: Wire, *, numbers: bool = True
) -> Trained:
    """Train under a plan, a process for each rank.

    Args:
        loaded: The job.
        plan: Its mini-batch is what is trained.
        figures: Of each device.
        wire: Between neighbours of a pipeline.
        numbers: As for ``TimedDevice``.
    """
    ranks = range(len(plan.slots))
    board, (store, port) = Board([plan.tensor_ranks(one) for one in ranks]), start_store()
    run = _Run(loaded, plan, board, port, figures, wire, numbers)

    def body(rank: int) -> Callable[[Say], None]:
        return lambda say: _train(run, rank, say)

    children = [Child(body(rank)) for rank in ranks]
    try:
        found: list[dict[str, Any]] = [child.hear(TIMEOUT_S) for child in children]
    finally:
        for child in (*children, store):
            child.close()
    step_s, spent_s = max(float(one["step_s"]) for one in found), defaultdict[str, float](float)
    for one in found:
        for kind, own_s in one["spent_s"].items():
            spent_s[kind] += own_s
    return Trained(
        step_s=step_s,
        peak_bytes=max(int(one["peak"]) for one in found),
        spent={kind: each_s / len(found) / step_s for kind, each_s in spent_s.items()},
    )


@dataclass(frozen=True)
class _Run:
    """What all ranks know."""

    loaded: LoadedJob
    plan: Plan
    board: Board
    port: int
    """Of the store at which they meet."""
    figures: Figures
    wire: Wire
    numbers: bool


def _train(run: _Run, rank: int, say: Say) -> None:
    torch.set_num_threads(1)
    device = TimedDevice(run.figures, numbers=run.numbers)
    with device.using():
        one = _Rank(run, rank, device)
        for step in range(MINIBATCHES):
            device.spent_s.clear()
            step_s = one.minibatch(step)
        one.close()
        say(
            {
                "step_s": step_s,
                "peak": device.peak_bytes(),
                "spent_s": device.spent_s,
            }
        )
    leave()


class _Rank:
    """One rank of a plan."""

    def __init__(self, run: _Run, rank: int, device: TimedDevice) -> None:
        loaded, plan = run.loaded, run.plan
        store = connect_rendezvous("127.0.0.1", run.port, TIMEOUT_S)
        connections = join(store, "ranks", rank, len(plan.slots), TIMEOUT_S)
        self._plan, self._row = plan, rank // plan.pipeline_depth
        self._ties = loaded.layout.tied
        groups = new_groups(memberships(plan, self._ties), TIMEOUT_S)
        connections.seal()
        on_devices = DeviceGroups(device, connections, print, print)
        own = Endpoint.of(device)
        endpoints = [Endpoint(*row) for row in gather_json([own.library, own.identity])]
        summing = memberships(plan, ())
        tying = tie_groups(plan, self._ties) if plan.state == "device" else []
        on_devices.form(endpoints, "auto", "auto", summing, tying, [], rank, TIMEOUT_S)
        self._network = Network(store, connections, groups, on_devices)
        memory = SlotMemory(PrivateMemory(), loaded.job, loaded.specs, device)
        memory.move_home(plan.state)
        memory.hold(plan.held_by(rank))
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
        self._device, self._board, self._rank = device, run.board, rank
        stage = StageSections(context, plan, rank, self._network)
        self._arenas = stage.held
        self._lanes = Lanes(
            context, plan, rank, stage, self._network, TensorTracker(memory.num_bytes)
        )
        around, sharing = neighbours(plan, rank), self._lanes.link_groups
        self._links = TimedLinks(*around, device, run.board, rank, run.wire, sharing)
        sizes = plan.minibatch_size, plan.microbatch_size
        source = MicrobatchSource(loaded.job, loaded.spec.seed, *sizes)
        self._lanes.connect(source, self._links)
        self._updater = memory.updater(self._arenas, FaultScript())
        self._gatherer = update.Gatherer(plan)
        self._lanes.begin(0, 0)

    def close(self) -> None:
        """Part with the other ranks, none of which needs this one any more."""
        self._links.flush()
        self._links.close()
        self._network.device_groups.finish()
        self.agree()
        self._network.device_groups.close()

    def agree(self) -> float:
        """Return the latest time of any rank; this one goes on then."""
        self._device.synchronise()
        now_s: float = max(gather_json(self._device.clock()))
        self._device.time.hold(now_s)
        return now_s

    def minibatch(self, step: int) -> float:
        """Train one; return its time."""
        began_s = self.agree()
        with self._board.playing(self._rank, self._device):
            world().barrier()  # all play before one looks what has come in
            computed = self._lanes.finish(step, self._lanes.open(step), began_s)
        reduction = self._lanes.of(step).reduction
        fits = reduction.reduce()
        totals = {self._plan.num_sections - 1: reduction.total_loss(computed.losses)}
        groups = self._network.groups, self._network.device_groups
        sum_tied(self._plan, self._row, self._ties, self._arenas, *groups)
        mine = update.contributions(self._arenas.values(), self._ties, totals, fits)
        self.agree()
        everything = self._gatherer.exchange(mine, 0, 0, 0, 0, save=False)
        decision = fold(1, step, everything.contributions, False)
        self._updater.apply(decision, [*self._arenas], self._lanes.refresh)
        self._lanes.follow(decision)
        return self.agree() - began_s
