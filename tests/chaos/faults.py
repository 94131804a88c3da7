"""The kinds of faults that strike a job of real processes, one function each.

A fault returns once it has done all that it does; that the job goes on is waited for
by the caller. What it needs of a fault that cannot strike now raises ``LookupError``,
``ValueError`` or ``OSError``, before anything has happened.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.watch import POLL_S, Watch
from tests.integration.jobs import Job, until
from tests.view import View

from spottrain.cloud.local.market import EventKind
from spottrain.cloud.port.provider import VmState
from spottrain.cloud.process import tree
from spottrain.manifest import list_checkpoints
from spottrain.storage.open import open_store

VMS = 4
ZONE = "a"
_SAVING_S = 20.0
_MANAGER_STOPS_S = 2.0


@dataclass(frozen=True)
class Struck:
    """What a fault strikes."""

    job: Job
    watch: Watch
    rng: random.Random
    disk: Path
    """Where checkpoints go: a small file system of their own."""
    slowed: set[str] = field(default_factory=set)
    """VMs that the cloud stops and continues all the time."""

    def pick(self) -> str:
        """Return a VM that trains."""
        return self.rng.choice(self.watch.vms())

    def pick_steady(self) -> str:
        """Return one that stays stopped if it is stopped."""
        return self.rng.choice([v for v in self.watch.vms() if v not in self.slowed])


def _worker(on: Struck) -> None:
    os.kill(on.watch.worker(on.pick()), signal.SIGKILL)


def _two_workers(on: Struck) -> None:
    pids = [on.watch.worker(vm) for vm in on.rng.sample(sorted(on.watch.vms()), 2)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _agent(on: Struck) -> None:
    os.kill(on.watch.agent(on.pick()), signal.SIGKILL)


def _supervisor(on: Struck) -> None:
    os.kill(on.watch.supervisor(on.pick()), signal.SIGKILL)


def _vm(on: Struck) -> None:
    tree.signal_groups(on.watch.groups(on.pick()), signal.SIGKILL)


def _all_vms(on: Struck) -> None:
    tree.signal_groups(on.watch.groups(*on.watch.vms()), signal.SIGKILL)


def _while_saving(on: Struck) -> None:
    """Kill a worker while a checkpoint is written."""
    pid = on.watch.worker(on.pick())
    whole = written(on.disk)
    give_up_at_s = time.monotonic() + _SAVING_S
    while all(written(on.disk).values()) or written(on.disk).keys() == whole.keys():
        if time.monotonic() > give_up_at_s:
            raise LookupError("no checkpoint was written")
        time.sleep(POLL_S / 10)
    os.kill(pid, signal.SIGKILL)


def written(disk: Path) -> dict[str, bool]:
    """Return the checkpoints begun, and whether the manifest of each was written."""
    folders = (one for one in disk.iterdir() if one.is_dir())
    return {one.name: (one / "manifest.json").exists() for one in folders}


def _hang(on: Struck) -> None:
    """Stop a worker: it neither dies nor goes on."""
    os.kill(on.watch.worker(on.pick_steady()), signal.SIGSTOP)


def _hang_in_forming(on: Struck) -> None:
    """Stop a worker while the generation forms that follows the death of another."""
    killed, stopped = on.rng.sample(sorted(on.watch.vms()), 2)
    dies, hangs = on.watch.worker(killed), on.watch.worker(stopped)
    if stopped in on.slowed:
        raise LookupError(f"{stopped} would not stay stopped")
    before = on.watch.number
    os.kill(dies, signal.SIGKILL)
    on.watch.until("a new generation", lambda: on.watch.number > before)
    os.kill(hangs, signal.SIGSTOP)


def _freeze(on: Struck) -> None:
    """Stop all processes of a VM, as a machine that is cut off."""
    tree.signal_groups(on.watch.groups(on.pick_steady()), signal.SIGSTOP)


def _manager_killed(on: Struck) -> None:
    on.job.kill_manager()
    _resume(on)


def _manager_ended(on: Struck) -> None:
    os.kill(on.job.manager_pid(), signal.SIGTERM)
    until("the manager is gone", lambda: not on.job.dir.is_managed())
    _resume(on)


def _manager_stopped(on: Struck) -> None:
    """Stop the manager for a while: VMs train on without it."""
    pid = on.job.manager_pid()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_MANAGER_STOPS_S)
    os.kill(pid, signal.SIGCONT)


def _resume(on: Struck) -> None:
    answer = on.job.resume("--detach")
    assert answer.code == 0, answer.err


def _cloud(on: Struck) -> None:
    """Kill the cloud's process: its VMs end with it."""
    os.kill(_cloud_pid(on.job), signal.SIGKILL)


def _cloud_pid(job: Job) -> int:
    for pid in job.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"spottrain.cloud.local" in words:
                return pid
    raise LookupError("the cloud has no process")


def _stop_and_resume(on: Struck) -> None:
    answer = on.job.run("stop", on.job.name)
    assert answer.code == 0, answer.err
    _resume(on)


def _settings(on: Struck) -> None:
    """Change a limit while a planned morph is under way."""
    before = on.watch.number
    _notice(on)
    on.watch.until("a morph", lambda: on.watch.number > before)
    max_usd = on.rng.uniform(50.0, 100.0)
    answer = on.job.run("set", on.job.name, f"budget.max_usd={max_usd:.2f}")
    assert answer.code == 0, answer.err


def _disk_full(on: Struck) -> None:
    """Use up all room for checkpoints until one has failed."""
    ballast = on.disk / "ballast"
    try:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        on.watch.until(
            "the disk is full",
            lambda: bool(View(on.watch.state).checkpoint_error),
        )
    finally:
        ballast.unlink()
    on.watch.until("room again", lambda: not View(on.watch.state).checkpoint_error)


def _archive_gone(on: Struck) -> None:
    """Take the user's code away and a VM that trains; give it back when that was seen."""
    archive, groups = on.job.dir.workdir, on.watch.groups(on.pick())
    aside = archive.rename(archive.with_name("aside"))
    try:
        tree.signal_groups(groups, signal.SIGKILL)
        on.watch.until("the loss is seen", lambda: _is_in_trouble(on))
    finally:
        aside.rename(archive)
    on.watch.until("the code is seen again", lambda: not _is_in_trouble(on))


def _is_in_trouble(on: Struck) -> bool:
    return bool(on.watch.state.launches.folder_trouble)


def _folder_gone(on: Struck) -> None:
    """Move the job's folder away until all of the job has ended; then resume it."""
    folder, vm_ids = on.job.dir.path, on.watch.vms()
    manager, saved = on.job.manager_pid(), list_checkpoints(open_store(on.disk))
    aside = folder.rename(folder.with_name(".aside"))
    try:
        until("the manager has ended", lambda: not Path(f"/proc/{manager}").exists())
        assert not on.watch.groups(*vm_ids), "VMs run on without a manager"
        assert not folder.exists(), "what is gone was made anew"
    finally:
        aside.rename(folder)
    step = View(on.watch.state).step
    newest = list_checkpoints(open_store(on.disk))[0].step
    assert newest >= max(step, *(one.step for one in saved)), "it was not saved"
    _resume(on)


def _read_only(on: Struck) -> None:
    """Make the job's folder read-only until that is seen.

    Its files are open for writing, so that its file system cannot be remounted; a mount of
    the folder over itself can be read-only. Root, whom no permissions stop, is stopped.
    """
    folder = str(on.job.dir.path)
    if subprocess.run(["mount", "--bind", folder, folder], check=False).returncode:
        raise LookupError("no right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        on.watch.until("it is seen", lambda: _is_in_trouble(on))
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    on.watch.until("that is over", lambda: not _is_in_trouble(on))


def _supervisor_stopped(on: Struck) -> None:
    os.kill(on.watch.supervisor(on.pick_steady()), signal.SIGSTOP)


def _nan(on: Struck) -> None:
    """Let the loss be NaN until that ends the job; resume it from the newest checkpoint
    before, as somebody does who wants none of the mini-batches left out."""
    pace_s = on.job.paced_s
    on.job.pace(math.nan)
    until("the job has ended", lambda: not on.job.dir.is_managed())
    on.job.pace(pace_s)
    on.watch.advance()
    state = on.watch.state
    assert state.outcome is not None
    assert state.outcome.exit_code == 3, state.outcome
    progress = state.history.progress
    good = progress.step - progress.nonfinite_in_row
    found = list_checkpoints(open_store(on.disk))
    assert found[0].step >= good, "the newest good state was not saved"
    for one in found:
        if one.step > good:
            shutil.rmtree(on.disk / one.name)
    _resume(on)


def _damaged(on: Struck) -> None:
    """Damage the newest checkpoint, and end all VMs."""
    groups = on.watch.groups(*on.watch.vms())
    # What is written meanwhile would make room by removing the one before.
    tree.signal_groups(groups, signal.SIGSTOP)
    newest = list_checkpoints(open_store(on.disk))[0].name
    path = next((on.disk / newest).glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tree.signal_groups(groups, signal.SIGKILL)


def _market(on: Struck, kind: EventKind, **what: float) -> tuple[str, ...]:
    """Let the market do something to a VM that trains; return it."""
    running = [vm.vm_id for vm in on.job.vms() if vm.state is VmState.RUNNING]
    machine = running.index(on.pick())
    return on.job.market(kind, zone=ZONE, machine=machine, **what)


def _notice(on: Struck) -> None:
    _market(on, "notice", lead_s=4.0, return_after_s=5.0)


def _market_kill(on: Struck) -> None:
    _market(on, "kill", return_after_s=1.0)


def _silence(on: Struck) -> None:
    _market(on, "silence", return_after_s=1.0)


def _slow(on: Struck) -> None:
    on.slowed.update(_market(on, "slow", factor=on.rng.uniform(1.5, 3.0)))


def _price(on: Struck) -> None:
    usd_per_hour = on.rng.uniform(0.05, 0.5)
    on.job.market("price", zone=ZONE, usd_per_hour=usd_per_hour)


def _capacity(on: Struck) -> None:
    """Take a VM for good, and have the market give another one later."""
    before = on.watch.number
    _market(on, "kill")
    on.watch.until("fewer VMs", lambda: on.watch.number > before and on.watch.trains())
    on.job.market("capacity", zone=ZONE, count=VMS)


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    strike: Callable[[Struck], None]
    breaks: bool = True
    """Whether a new generation must follow."""


KINDS = {
    "worker": Kind(_worker),
    "two workers": Kind(_two_workers),
    "agent": Kind(_agent),
    "supervisor": Kind(_supervisor),
    "supervisor stopped": Kind(_supervisor_stopped),
    "VM": Kind(_vm),
    "all VMs": Kind(_all_vms),
    "worker while saving": Kind(_while_saving),
    "hang": Kind(_hang),
    "hang in forming": Kind(_hang_in_forming),
    "freeze": Kind(_freeze),
    "manager killed": Kind(_manager_killed, breaks=False),
    "manager ended": Kind(_manager_ended, breaks=False),
    "manager stopped": Kind(_manager_stopped, breaks=False),
    "cloud": Kind(_cloud),
    "stop and resume": Kind(_stop_and_resume),
    "settings in a morph": Kind(_settings),
    "disk full": Kind(_disk_full, breaks=False),
    "archive gone": Kind(_archive_gone),
    "folder gone": Kind(_folder_gone),
    "state read-only": Kind(_read_only, breaks=False),
    "NaN": Kind(_nan),
    "checkpoint damaged": Kind(_damaged),
    "notice": Kind(_notice),
    "market kill": Kind(_market_kill),
    "silence": Kind(_silence),
    "slow": Kind(_slow, breaks=False),
    "price": Kind(_price, breaks=False),
    "capacity": Kind(_capacity),
}
