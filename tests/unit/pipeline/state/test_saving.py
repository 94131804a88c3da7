"""Checkpoints of a worker, in this process, on a disk that is full for a while."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from tests.builders import a_run
from tests.fakes.deferred import DeferredDevice
from tests.fakes.timed import Figures, TimedDevice
from tests.gpu import runs
from tests.gpu.hidden_syncs import NO_LOADERS
from tests.unit.pipeline.memory import LocalHolder

from spottrain import machine
from spottrain.manifest import MANIFEST_FILE, list_checkpoints, new_name, read_manifest
from spottrain.morphing.adapt import checkpointing
from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.comm.groups import open_rendezvous
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.loader.prefetch import Prefetcher
from spottrain.pipeline.model.loaded import load
from spottrain.pipeline.process.tasks import initialise
from spottrain.pipeline.state import saving
from spottrain.pipeline.state.context import StopRequest, WorkerContext
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.train.generation import run_generation
from spottrain.storage.open import open_store
from spottrain.wire import messages

STEPS = 8
ROOMY = pytest.mark.parametrize("small_disk", ["8m"], indirect=True)
R = TypeVar("R")


@dataclass
class Manager:
    """What a worker tells, and is told: the border of these tests."""

    hear: Callable[[messages.SupervisorReport], None] = lambda _: None
    stop: int = StopRequest.NONE
    reports: list[messages.SupervisorReport] = field(default_factory=list)

    def report(self, report: messages.SupervisorReport) -> None:
        self.reports.append(report)
        self.hear(report)

    def of(self, kind: type[R]) -> list[R]:
        return [report for report in self.reports if isinstance(report, kind)]

    def stop_request(self) -> int:
        return self.stop

    def ending(self, reason: str) -> None:
        raise AssertionError(reason)

    def open_loader(self, number: int) -> socket.socket:
        raise AssertionError(number)

    def newest_trace(self) -> messages.TraceMinibatches | None:
        return None

    def newest_share(self) -> messages.ShareMinibatch | None:
        return None


class Disk:
    """A disk with room for so many checkpoints, which others fill for a while."""

    def __init__(self, place: Path) -> None:
        self.place, self._ballast = place, place / "ballast"

    def leave(self, num_bytes: float) -> None:
        """Fill it but for so many bytes."""
        self.clear()
        room = os.statvfs(self.place)
        free = room.f_bavail * room.f_bsize
        self._ballast.write_bytes(b"0" * int(free - num_bytes))

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(saving, "RETRY_S", 0.01)


@pytest.fixture
def port() -> Iterator[int]:
    server = open_rendezvous("127.0.0.1", 0, is_server=True, timeout_s=600.0)
    yield server.port  # type: ignore[attr-defined]
    del server


def size_of(folder: Path) -> int:
    """Return what a folder takes of its disk, which is in whole pages."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


def train(
    place: Path,
    port: int,
    manager: Manager,
    begun: Callable[[], None] = lambda: None,
    every_steps: int = STEPS,
    losses_per_s: float = 0.0,
    device: Device | None = None,
    job: str = "tiny",
) -> None:
    """Train a job on one slot; ``begun`` is called once weights are written."""
    often = {"checkpoint_keep": 2, "checkpoint_every_steps": every_steps}
    spec = runs.job_spec(place, job, steps=STEPS, **often)
    loaded = load(spec, runs.WORKDIR)
    first = initialise(loaded, messages.Initialise())
    assert isinstance(first, messages.CheckpointSaved)
    begun()
    holder, device = LocalHolder(), device or HostDevice()
    context = WorkerContext(
        loaded=loaded,
        vm_id="a",
        slot=0,
        device=device,
        memory=SlotMemory(holder, loaded.job, loaded.specs, device, scales_loss=False),
        checkpoints=open_store(spec.checkpoint_path),
        supervisor=manager,
        faults=FaultScript(),
        batches=Prefetcher(loaded.job, 0, NO_LOADERS, manager.open_loader),
    )
    state, sections = "host" if device.is_host else "device", loaded.layout.num_sections
    plan = runs.plan_for(spec, (1, 1), "a", sections, state=state)
    command = dataclasses.replace(
        a_run(plan, store=("127.0.0.1", port), checkpoint=first.name),
        checkpoint_losses_per_s=losses_per_s,
    )
    try:
        run_generation(context, command, os.getpid())
    finally:
        context.memory.keep_only(())
        holder.close()


@ROOMY
def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint(small_disk: Path, port: int) -> None:
    """What is left of the one that failed may not take the room of the next ones."""
    disk = Disk(small_disk)
    store = small_disk / "checkpoints"
    there: dict[int, set[int]] = {}

    def hear(report: messages.SupervisorReport) -> None:
        if isinstance(report, messages.CheckpointFailed):
            disk.clear()
        if isinstance(report, messages.CheckpointSaved):
            steps = (entry.name.split("-")[1] for entry in store.iterdir())
            there[report.step] = set(map(int, steps))
            if report.step == 2:
                disk.leave(size_of(next(store.glob("step-2-*"))) * 0.9)

    manager = Manager(hear)
    train(small_disk, port, manager, every_steps=2)

    assert [r.step for r in manager.of(messages.CheckpointFailed)] == [4]
    assert there == {2: {0, 2}, 6: {0, 2, 6}, 8: {2, 6, 8}}
    assert [e.step for e in list_checkpoints(open_store(store))] == [8, 6]
    assert len(list(store.iterdir())) == 2


@ROOMY
def test_finished_work_is_kept_until_it_can_be_saved(small_disk: Path, port: int) -> None:
    disk = Disk(small_disk)

    def hear(report: messages.SupervisorReport) -> None:
        if isinstance(report, messages.MinibatchCommitted) and report.step == 7:
            disk.leave(0)
        failures = manager.of(messages.CheckpointFailed)
        if len(failures) == 3 and report is failures[-1]:
            disk.clear()

    manager = Manager(hear)
    train(small_disk, port, manager)

    assert [r.step for r in manager.of(messages.CheckpointFailed)] == [STEPS] * 3
    saved, stopped = manager.reports[-2:]
    assert isinstance(saved, messages.CheckpointSaved)
    assert saved.step == STEPS
    assert isinstance(stopped, messages.GenerationStopped)
    assert stopped.done
    assert len(list((small_disk / "checkpoints").iterdir())) == 2


@ROOMY
@pytest.mark.parametrize("why", ["asked to stop", "too late"])
def test_finished_work_is_not_kept_for_ever(
    small_disk: Path, port: int, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Asked to stop it is the next generation that goes on, with the same memory."""
    disk = Disk(small_disk)
    if why == "too late":
        monkeypatch.setattr(saving, "GRACE_S", 0.0)

    def hear(report: messages.SupervisorReport) -> None:
        if isinstance(report, messages.MinibatchCommitted) and report.step == 7:
            disk.leave(0)
        if isinstance(report, messages.CheckpointFailed) and why == "asked to stop":
            manager.stop = StopRequest.STOP

    manager = Manager(hear)
    train(small_disk, port, manager)

    stopped = manager.reports[-1]
    assert isinstance(stopped, messages.GenerationStopped)
    assert stopped.step == STEPS
    assert stopped.done == (why == "too late")


def test_what_was_cut_short_goes_when_the_next_generation_begins(tmp_path: Path, port: int) -> None:
    store = tmp_path / "checkpoints"
    cut, later, damaged = (store / new_name(99, generation) for generation in (0, 5, 0))

    def begun() -> None:
        for folder in (cut, later, damaged):
            folder.mkdir()
            (folder / "section-0.safetensors").write_bytes(b"half")
        (damaged / MANIFEST_FILE).write_text("{")

    train(tmp_path, port, Manager(), begun)

    assert not cut.exists()
    assert later.exists()
    assert damaged.exists()


def test_first_weights_that_find_no_room_leave_nothing(small_disk: Path) -> None:
    Disk(small_disk).leave(2000)
    spec = runs.job_spec(small_disk)

    failed = initialise(load(spec, runs.WORKDIR), messages.Initialise())

    assert isinstance(failed, messages.CheckpointFailed)
    assert os.strerror(errno.ENOSPC) in failed.reason
    assert list((small_disk / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(("losses_per_s", "saved"), [(1e6, True), (0.0, False)])
def test_losses_decide_how_often_checkpoints_are_saved(
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    losses_per_s: float,
    saved: bool,
) -> None:
    monkeypatch.setattr(checkpointing, "MIN_S", 0.0)
    manager = Manager()
    train(tmp_path, port, manager, every_steps=0, losses_per_s=losses_per_s)

    steps = [report.step for report in manager.of(messages.CheckpointSaved)]
    told = manager.of(messages.MinibatchCommitted)
    assert steps[-1] == STEPS
    assert (len(steps) > 1) is saved
    assert all((one.checkpoint_every_steps == 1) is saved for one in told)


@pytest.mark.rotated
def test_copies_beside_training_are_of_the_mini_batch_at_which_they_were_begun(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever state is, and whether or not there is memory for all copies."""
    found = {}
    for name, device in {"host": HostDevice(), "device": DeferredDevice(7)}.items():
        train(tmp_path / name, port, Manager(), every_steps=3, device=device)
        store = open_store(tmp_path / name / "checkpoints")
        manifests = [read_manifest(store, entry.name) for entry in list_checkpoints(store)]
        found[name] = [[one.step, *(file.sha256 for file in one.files)] for one in manifests]
        monkeypatch.setattr(machine, "available_bytes", lambda: 0)

    assert [step for step, *_ in found["host"]] == [STEPS, 6]
    assert found["host"] == found["device"]


def high_water_bytes() -> int:
    """Return the most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.rotated
def test_weights_and_copies_without_numbers_take_no_memory(tmp_path: Path, port: int) -> None:
    before: list[int] = []

    def begun() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the maximum begins anew (proc(5))
        before.append(high_water_bytes())

    device = TimedDevice(Figures.of("H100"), numbers=False)
    train(tmp_path, port, Manager(), begun, 3, device=device, job="blank_jobs:gpt_35m")

    held = device.peak_bytes()
    assert held is not None
    assert held > 16 * 30_000_000
    assert high_water_bytes() - before[0] < held // 4
