"""The inputs of planning, and their checks."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Literal

from spottrain.codec import SCHEMA_VERSION, encode
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.placement import Device, DeviceKind
from spottrain.morphing.plan.profiles import check_profile, derive_profile
from spottrain.morphing.simulate.compute import Compute
from spottrain.wire.model import (
    ModelFacts,
    Network,
    Precision,
    Profile,
    Reduction,
    StateHome,
    WireType,
)
from spottrain.wire.plan import Plan, ScheduleKind, Semantics

Objective = Literal["throughput", "examples_per_dollar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked of a plan, beside the model."""

    slots: tuple[Device, ...]
    minibatch_size: int
    microbatch_size: int | None
    """``None``: the smallest of the profile's that is nearly as good as the best."""
    reduction: Reduction
    previous: Plan | None = None
    """The plan that runs now: of equal placements the one nearest to it is taken, and of
    plans that are as good the one that is like it."""
    schedule: ScheduleKind | None = None
    """``None``: whatever is best."""
    recompute: bool | None = None
    """``None``: whatever is best."""
    objective: Objective = "throughput"
    lag_share: float = 0.0
    """Training time at stake with a loss, see ``policy.lag_share``: of plans nearly as
    fast the one that survives losses is taken."""
    precision: Precision = "fp32"
    state: StateHome | None = None
    """Home of committed state of workers on GPUs; ``None``: whatever is best."""
    pipeline_depth: int | None = None
    """``None``: whatever is best."""
    wire: WireType = "own"
    """In which activations and their gradients travel between stages."""
    network: Network = "auto"
    """What sums gradients of GPUs; ``auto``: the faster one of those that were measured."""
    peer_copies: int = 0
    """As in ``Plan``: of plans without second copies, where VMs have memory for them."""
    semantics: Semantics = "synchronous"
    merges: bool = False
    """Whether replicas may compute several virtual nodes at once, each type of device as many
    as suit it; in fast mode only."""
    tensor_parallel: int | None = 1
    """Slots of a VM that divide the matrices of a stage, see ``tensor_groups``; ``None``: as
    many of ``ModelFacts.tensor_sizes`` as is best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs(PlanRequest):
    """Everything that a choice depends on; the same inputs give the same choice."""

    facts: ModelFacts
    profile: Profile
    """Links, and times of devices of speed 1."""
    measured: tuple[Profile, ...] = ()
    """Of other types of devices, as they were measured."""
    schema_version: int = SCHEMA_VERSION

    def profile_on(self, kind: DeviceKind, microbatch_size: int | None = None) -> Profile:
        """Return the profile of a kind of device.

        As measured, if it was measured and knows a micro-batch size; else the job's, derived
        by the speed.
        """
        name, speed = kind
        for one in self.measured:
            if one.device == name and microbatch_size in (None, *one.microbatch_sizes):
                return one
        if speed == 1:
            return self.profile
        return derive_profile(self.profile, name or self.profile.device, speed)

    @property
    def group_size(self) -> int:
        """How many slots compute a stage together."""
        return self.tensor_parallel or 1

    @property
    def compute(self) -> Compute:
        """What workers compute on: GPUs if all slots are some."""
        on_gpu = bool(self.slots) and all(device.is_gpu for device in self.slots)
        return Compute(
            on_gpu=on_gpu,
            precision=self.precision,
            wire=self.wire,
            network=self.network,
            semantics=self.semantics,
            group_size=self.group_size,
        )

    @property
    def counts_cores(self) -> bool:
        """Whether slots may have to share cores: a written profile says how long tasks take,
        be it that they only wait."""
        return self.profile.origin != "written"

    @property
    def homes(self) -> tuple[StateHome, ...]:
        """Homes of committed state to choose from, the safer one first."""
        if not self.compute.on_gpu:
            return ("host",)
        return ("host", "device") if self.state is None else (self.state,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion(PlanRequest):
    """A request to the planner, to be kept with its answer.

    Facts and profiles hardly change over the life of a job and are named by a hash.
    """

    model_sha256: str
    """Of the JSON of facts and profiles, one after the other."""


def question_of(inputs: PlanInputs) -> PlanQuestion:
    """Return ``inputs`` in the form in which they are kept."""
    model = "".join(map(encode, (inputs.facts, inputs.profile, *inputs.measured)))
    asked = {one.name: getattr(inputs, one.name) for one in fields(PlanRequest)}
    return PlanQuestion(model_sha256=hashlib.sha256(model.encode()).hexdigest(), **asked)


def check_inputs(inputs: PlanInputs) -> None:
    """Check that a plan can be made from the inputs.

    Raises:
        PlanError: One line that names the field: see ``profiles.check_profile``; or the
            model has fewer sections than the depth that was asked for, the mini-batch is no
            multiple of the micro-batch, the profile does not know the micro-batch, or a device
            has no memory, speed or price that makes sense.
    """
    for profile in (inputs.profile, *inputs.measured):
        check_profile(profile, inputs.facts)
    sections = len(inputs.facts.sections)
    if inputs.pipeline_depth is not None and inputs.pipeline_depth > sections:
        raise PlanError(
            f"pipeline depth must be at most {sections}, the sections of the model: got "
            f"{inputs.pipeline_depth}; ask for less"
        )
    known, asked = inputs.profile.microbatch_sizes, inputs.microbatch_size
    minibatch_size = inputs.minibatch_size
    if asked is not None:
        if min(minibatch_size, asked) < 1 or minibatch_size % asked:
            raise PlanError(
                "minibatch_size must be a multiple of microbatch_size: got "
                f"{minibatch_size} and {asked}; change one of them"
            )
        if asked not in known:
            raise PlanError(
                f"the profile has micro-batches of {known}: got microbatch_size "
                f"{asked}; calibrate again"
            )
    elif minibatch_size < 1 or all(minibatch_size % m for m in known):
        raise PlanError(
            f"minibatch_size must be a multiple of one of the profile's micro-batches "
            f"{known}: got {minibatch_size}; change it"
        )
    for device in inputs.slots:
        name = f"{device.slot.vm_id}[{device.slot.index}]"
        positive(f"speed of {name}", device.speed)
        kinds = [one.device for one in inputs.measured]
        if device.kind and device.kind not in kinds:
            raise PlanError(
                f"kind of {name} must be one that was measured, {kinds}: got {device.kind}; "
                "calibrate on it"
            )
        positive(f"memory_bytes of {name}", device.memory_bytes)
        host = device.host_memory_bytes
        positive(f"host_memory_bytes of {name}", host, or_zero=True)
        locked = device.locked_memory_bytes
        positive(f"locked_memory_bytes of {name}", locked, or_zero=True)
        positive(f"usd_per_hour of {name}", device.usd_per_hour, or_zero=True)
        positive(f"cores of {name}", device.cores, or_zero=True)
    if inputs.objective == "examples_per_dollar":
        for device in inputs.slots:
            positive(f"usd_per_hour of {device.slot.vm_id}", device.usd_per_hour)


def positive(name: str, value: float, *, or_zero: bool = False) -> None:
    """Check that a number is finite and above 0.

    Raises:
        PlanError: It names ``name``.
    """
    if not (math.isfinite(value) and (value > 0 or (or_zero and value == 0))):
        least = "0 or more" if or_zero else "above 0"
        raise PlanError(f"{name} must be a number {least}: got {value}; measure again")
