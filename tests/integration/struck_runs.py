"""Runs of the tiny job that a fault strikes, on any shape and runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tests.builders import a_spec
from tests.faults import Action, environment_of
from tests.integration.fleet import Fleet, Host, Zygote, make_plan

from spottrain.pipeline.base.faults import Hook
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Network, Precision, Reduction, StateHome
from spottrain.wire.plan import Plan

NUM_SECTIONS = 4
STEPS = 5
NAMES = "abcd"


STEP_OF = {
    Hook.JOINED: 0,
    Hook.AGREED: 0,
    Hook.MOVED: 0,
    Hook.SNAPSHOT: 2,
    Hook.CHECKPOINT_WRITTEN: 2,
}
"""Mini-batches applied when the fault strikes, where it is not 3."""


@dataclass(frozen=True)
class Runtime:
    """What workers compute on, and how."""

    device: str = "cpu"
    state: StateHome = "host"
    precision: Precision = "fp32"
    network: Network = "auto"
    """Without gloo, stand-ins sum on their device."""
    segments: int = 1

    def __str__(self) -> str:
        name = f"{self.device.partition(':')[0]}-{self.state}-{self.precision}"
        name += "" if self.network == "auto" else f"-{self.network}"
        return name if self.segments == 1 else f"{name}-segments"

    @property
    def outlives_workers(self) -> bool:
        return self.device == "cpu" or self.state == "host"


RUNTIMES = (
    Runtime(),
    Runtime("tests.fakes.deferred:3", "host", "bf16", "nccl", segments=2),
    Runtime("tests.fakes.deferred:9", "device", "fp32", "gloo"),
    Runtime("cpu", "host", "fp16"),
    Runtime("tests.fakes.deferred:1", "host", "fp32", "gloo"),
    Runtime("tests.fakes.deferred:2", "device", "fp16", "nccl", segments=4),
)


@dataclass(frozen=True)
class Blow:
    hook: Hook
    rank: int
    action: Action
    step: int


def job_spec(
    folder: Path,
    reduction: Reduction = "exact",
    steps: int = STEPS,
    precision: Precision = "fp32",
    entrypoint: str = "tiny_job:job",
    network: Network = "auto",
) -> JobSpec:
    return a_spec(
        name="tiny",
        entrypoint=entrypoint,
        precision=precision,
        network=network,
        steps=steps,
        reduction=reduction,
        checkpoint_path=str(folder / "checkpoints"),
        checkpoint_every_steps=2,
        checkpoint_keep=3,
        lease_s=100.0,
    )


def train(
    zygote: Zygote,
    folder: Path,
    depth: int,
    width: int,
    blows: Sequence[Blow] = (),
    chunks: int = 1,
    runtime: Runtime = RUNTIMES[0],
    entrypoint: str = "tiny_job:job",
    reduction: Reduction = "exact",
    selective: bool = False,
) -> tuple[dict[str, bytes], Fleet]:
    """Train to the end on the given shape, on a smaller one after a VM is lost."""
    spec = job_spec(
        folder,
        reduction,
        precision=runtime.precision,
        entrypoint=entrypoint,
        network=runtime.network,
    )
    spec = replace(spec, selective_recompute=selective)
    script = [
        {
            "hook": blow.hook,
            "rank": blow.rank,
            "action": blow.action,
            "step": blow.step,
            "mark": str(folder / f"mark-{number}"),
        }
        for number, blow in enumerate(blows)
    ]

    def choose(machines: Sequence[str]) -> Plan:
        home: dict[str, Any] = {"state": runtime.state, "segments": runtime.segments}
        if len(machines) < depth * width:
            return make_plan(spec, 1, 1, machines, NUM_SECTIONS, **home)
        return make_plan(spec, depth, width, machines, NUM_SECTIONS, chunks=chunks, **home)

    # One machine more than the plan takes, so that losing one leaves somebody.
    names = NAMES[: depth * width + (1 if depth * width == 1 else 0)]
    environment = environment_of(script)
    hosts = {name: Host(device=runtime.device) for name in names}
    with Fleet(spec, names, folder / "log", zygote, environment, hosts=hosts) as fleet:
        fleet.ready()
        weights = fleet.train(choose, fleet.initialise())
    for number, blow in enumerate(blows):
        assert (folder / f"mark-{number}").exists(), f"{blow} did not strike"
    return weights, fleet


def can_reach(hook: Hook, depth: int) -> bool:
    return hook is not Hook.RECOMPUTE or depth > 1


class Undisturbed(Protocol):
    """Trains on one CPU, undisturbed and once; returns the weights at the end."""

    def __call__(self, precision: Precision, entrypoint: str = ...) -> dict[str, bytes]: ...
