"""Trains the quickstart's model three times, once while its VMs are taken away."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import spottrain
from spottrain import children
from spottrain.cloud.port.provider import Vm
from spottrain.errors import SpottrainError
from spottrain.gpus.find import own_gpus
from spottrain.storage.open import open_store
from spottrain.varuna_manager.api.job import Job, launch
from spottrain.varuna_manager.jobs.folder import find
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.measurements import Measurements, Minibatch
from spottrain.varuna_manager.launch.machines import live_vms, open_provider
from spottrain.varuna_manager.verify.verdict import (
    Comparison,
    Speed,
    Verdict,
    check_bill,
    check_losses,
    check_weights,
    weights,
)

ENTRYPOINT = "byte_gpt:training_job"
STEPS = 120
MINIBATCH, MICROBATCH = 16, 4
"""As in the quickstart."""
STRIKES = (0.2, 0.45, 0.7)
"""After these shares of its mini-batches a job loses a VM."""
STAGE_BYTES = 56_000_000
"""Memory of a local VM without a GPU: too small for the whole model."""
VMS = 4
FAST_SHARE = 0.5
"""Mini-batches of the job whose speed alone counts, of those of the others."""
WARM_UP = 5
"""First mini-batches, whose time does not count."""
LIMIT_S = 3600.0
"""A job that takes longer is ended, and has failed."""
_POLL_S = 0.5

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """Where and how long to train.

    Args:
        file: The job file; its folder has the code.
        gpu: Train on GPUs of this machine.
        cloud: Rent there instead; empty: this machine.
        max_usd: Of all jobs together.
        checkpoints: URL that VMs of a cloud keep checkpoints at.
        steps: Mini-batches.
    """

    file: Path
    gpu: bool = False
    cloud: str = ""
    max_usd: float = 5.0
    checkpoints: str = ""
    steps: int = STEPS

    @property
    def where(self) -> str:
        """In words."""
        return self.cloud or f"this machine, {'GPU' if self.gpu else 'CPU'}"


def run(trial: Trial, say: Callable[[str], None]) -> Verdict:
    """Train, and return what came out; whatever happens, nothing stays rented.

    Args:
        trial: What to do.
        say: Called with a line on each step.

    Raises:
        SpottrainError: A job could not be launched.
    """
    began_s = time.monotonic()
    say(f"one VM, nothing happens: {trial.steps} mini-batches, reduction: exact")
    calm = _trained(trial, "verify-calm", _alone(trial))
    say(f"up to {VMS} VMs, {len(STRIKES)} of which are taken away on the way")
    struck = _trained(trial, "verify-losses", _together(trial), STRIKES)
    fast_steps = max(WARM_UP + 1, round(FAST_SHARE * trial.steps))
    say(f"one VM, reduction: fast, then a loop by hand: {fast_steps} mini-batches each, for speed")
    fast = _trained(trial, "verify-fast", {**_alone(trial), "reduction": "fast"}, steps=fast_steps)
    ran = (calm, struck, fast)
    speed = None
    if not trial.cloud and all(one.ended_well for one in (calm, fast)):
        plain_s = _plain_loop(trial, fast_steps)
        seconds = (plain_s[WARM_UP:], fast.step_s[WARM_UP:], calm.step_s[WARM_UP:])
        speed = Speed(*(MINIBATCH / statistics.median(one) for one in seconds))
    return Verdict(
        version=spottrain.__version__,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        where=trial.where,
        machine=machine(),
        steps=trial.steps,
        strikes=struck.strikes,
        wall_s=time.monotonic() - began_s,
        usd=sum(one.usd for one in ran),
        checks=[*_checks(calm, struck), *(_bill_of(one) for one in ran)],
        speed=speed,
        jobs={one.name: one.status for one in ran},
    )


# --- Jobs -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Trained:
    """A job that has ended."""

    name: str
    status: Mapping[str, Any]
    failure: str
    """Why it did not train to its end; empty: it did."""
    strikes: int
    losses: Sequence[float]
    step_s: Sequence[float]
    weights: Mapping[str, str]
    """Hash of each file of its last checkpoint."""
    vms: Sequence[Vm]
    """All that it had, as its cloud lists them."""
    usd: float
    """By its ledger."""

    @property
    def ended_well(self) -> bool:
        """True if it trained to its end."""
        return not self.failure


def _alone(trial: Trial) -> Settings:
    """Return the settings of a job on one VM."""
    return _settings(trial, vms=1, slot_memory_bytes=None)


def _together(trial: Trial) -> Settings:
    """Return the settings of a job on several VMs, of which each holds a part of the model."""
    return _settings(trial, vms=VMS, slot_memory_bytes=None if trial.gpu else STAGE_BYTES)


def _settings(trial: Trial, vms: int, slot_memory_bytes: int | None) -> Settings:
    settings: Settings = {
        "budget": {"max_usd": trial.max_usd / 3},
        "minibatch_size": MINIBATCH,
        "microbatch_size": MICROBATCH,
        "runtime": {"precision": "fp32"},
        "loader": {"workers": 0},
        "checkpoint": {"every_steps": 10},
        "resources": {"min_vms": 1, "max_vms": vms, "device": "gpu" if trial.gpu else "cpu"},
        "local": {"events": [], "zones": [{"name": "local-a"}]},
    }
    if trial.cloud:
        settings["resources"] |= {"provider": trial.cloud, "device": "gpu"}
    elif not trial.gpu:
        settings["local"]["zones"] = [
            {"name": "local-a", "capacity": vms, "slot_memory_bytes": slot_memory_bytes}
        ]
    return settings


def _trained(
    trial: Trial,
    name: str,
    settings: Settings,
    strikes: Sequence[float] = (),
    steps: int | None = None,
) -> _Trained:
    """Train a job to its end; take a VM from it after shares of its mini-batches."""
    steps = steps or trial.steps
    if trial.checkpoints:  # a place of its own: it must not go on from an earlier one's
        place = f"{trial.checkpoints.rstrip('/')}/{name}-{secrets.token_hex(4)}"
        settings["checkpoint"]["path"] = place
    job = launch(trial.file, name=name, steps=steps, **settings)
    failure, struck = "", 0
    with _ended(job):
        try:
            struck = sum(_strike(job, round(share * steps)) for share in strikes)
            job.wait(LIMIT_S)
        except SpottrainError as error:
            failure = str(error)
    return _result(job, failure, struck)


@contextlib.contextmanager
def _ended(job: Job) -> Iterator[None]:
    """Take the job down unless it has ended by itself."""
    try:
        yield
    finally:
        if find(job.name).is_managed():
            job.down()


def _strike(job: Job, step: int) -> bool:
    """Take a VM away once a job has trained so far; False: it has ended before."""
    folder, give_up_at_s = find(job.name), time.monotonic() + LIMIT_S
    while True:
        status = job.status()
        if not folder.is_managed() or time.monotonic() > give_up_at_s:
            return False
        if status["step"] >= step and status["state"] == "running":
            break
        time.sleep(_POLL_S)
    with closing(open_provider(folder)) as provider:
        alive = live_vms(provider, folder)
        provider.terminate([alive[0].vm_id] if alive else [])
    return bool(alive)


def _result(job: Job, failure: str, struck: int) -> _Trained:
    folder = find(job.name)
    with closing(Measurements(folder.measurements, read_only=True)) as measured:
        rows: list[Minibatch] = list(measured.minibatches())
    with closing(open_provider(folder)) as provider:
        vms = provider.list_vms(folder.name)
    found: Mapping[str, str] = {}
    if not failure:
        place = folder.config().checkpoint.path or str(folder.checkpoints)
        found = weights(open_store(place), uid_of(folder))
    return _Trained(
        name=job.name,
        status=job.status(),
        failure=failure,
        strikes=struck,
        losses=[row.loss for row in rows],
        step_s=[row.step_s for row in rows if row.step_s is not None],
        weights=found,
        vms=vms,
        usd=job.cost()["usd_spent"],
    )


# --- Checks -----------------------------------------------------------------------------


def _checks(calm: _Trained, struck: _Trained) -> Iterator[Comparison]:
    for one in (calm, struck):
        found = one.failure or f"{one.status['step']} mini-batches"
        yield Comparison(one.name, one.ended_well, found)
    wanted = len(STRIKES)
    yield Comparison("losses of VMs", struck.strikes == wanted, f"{struck.strikes} of {wanted}")
    yield check_weights(calm.weights, struck.weights)
    yield check_losses(calm.losses, struck.losses)


def _bill_of(one: _Trained) -> Comparison:
    bill = check_bill(one.vms, one.usd)
    return Comparison(f"bill of {one.name}", bill.passed, bill.found)


# --- What it is compared with ---------------------------------------------------------


def _plain_loop(trial: Trial, steps: int) -> list[float]:
    """Return the seconds of each mini-batch of the loop by hand, on one device."""
    argv = (
        *(sys.executable, "-P", "-m", "spottrain.varuna_manager.verify.plain"),
        *(ENTRYPOINT, str(trial.file.parent), "--steps", str(steps)),
        *("--minibatch", str(MINIBATCH), "--microbatch", str(MICROBATCH)),
        *("--device", "cuda" if trial.gpu else "cpu"),
    )
    done = children.run(argv, env={**os.environ, "SPOTTRAIN_STEPS": str(steps)})
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise SpottrainError(f"the loop by hand ended with {done.returncode}: {' '.join(last)}")
    taken_s: list[float] = json.loads(done.stdout)["step_s"]
    return taken_s


def machine() -> dict[str, str]:
    """Return what this machine is, by name."""
    facts = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": str(os.cpu_count()),
        "Python": platform.python_version(),
        "torch": version("torch"),
    }
    with contextlib.suppress(SpottrainError):
        if gpus := own_gpus():
            facts["GPUs"] = ", ".join(gpu.name for gpu in gpus)
    return facts
