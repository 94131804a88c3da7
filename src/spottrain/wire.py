"""What manager, agent, supervisor and worker say to each other, as JSON.

Standard library only: this file is carried to machines as it is. Every message is a
frozen dataclass; ``encode`` and ``decode`` turn it into JSON and back, strictly: an
unknown or missing field, a wrong type or another schema version raises ``WireError``.

    manager --Command--> agent --Command--> supervisor --> worker
    manager <--Report--- agent <--Report--- supervisor <-- worker
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from spottrain.errors import WireError

SCHEMA_VERSION = 1
"""Version of every message and file defined here."""

ScheduleKind = Literal["varuna", "1f1b", "gpipe", "interleaved"]
Reduction = Literal["fast", "exact"]
MOST_CHUNKS = 42
"""Runs of sections a stage; codes of more do not fit into a schedule's bytes."""


# --- The model, measured and planned ---------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionFacts:
    """What is known of one section without running it."""

    index: int
    param_bytes: int
    """Parameters, a tied one counted in every section that uses it."""
    optimizer_bytes: int
    """Optimizer state of those parameters."""
    activation_bytes_per_example: int
    """The one activation that leaves this section for the next (0 for the last)."""
    gradient_bytes: int | None = None
    """Gradients of the parameters that are trained; ``None``: as many as parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """One parameter that several sections use."""

    name: str
    sections: tuple[int, ...]
    """Ascending; the first one owns it in norms and exports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the tracer found out about the user's model."""

    fingerprint: str
    """Changes when parameters, shapes, optimizer or sections change."""
    num_parameters: int
    """Distinct parameters' elements, a tied one counted once."""
    blocks: str
    """Name of the module list that was cut, or ``"CutPoint"``."""
    sections: tuple[SectionFacts, ...]
    tied: tuple[TiedParameter, ...]
    dataset_len: int
    heldout_len: int
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionProfile:
    """What calibration measured of one section at one micro-batch size: medians."""

    index: int
    forward_s: float
    backward_s: float
    recompute_s: float
    saved_bytes: int
    """Tensors autograd keeps between forward and backward of one micro-batch, without
    what came in and what goes out."""
    output_bytes: int
    """The activation sent to the next section for one micro-batch."""
    forward_spread: float = 0.0
    """Standard deviation as a share of the median, robust to outliers; so are the others."""
    backward_spread: float = 0.0
    recompute_spread: float = 0.0
    batch_bytes: int = 0
    """The micro-batch itself, as the user's data come, which every stage holds."""
    forward_bytes: int = 0
    """At the highest moment of a forward that keeps nothing for the backward, beyond the
    micro-batch and the section's input; so are the next two."""
    recompute_bytes: int = 0
    """At the highest moment of a forward that keeps what the backward needs."""
    backward_bytes: int = 0
    """At the highest moment of the backward, beyond also what the forward has left and
    the gradient of what goes out."""
    update_bytes: int = 0
    """At the highest moment of the optimizer's first step, its new state included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchProfile:
    """All sections at one micro-batch size."""

    microbatch_size: int
    sections: tuple[SectionProfile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """Messages from one device to another: ``latency_s + bytes / bandwidth``."""

    latency_s: float
    bandwidth_bytes_per_s: float
    jitter: float = 0.0
    """Standard deviation of that time as a share of it, robust to outliers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingProfile:
    """All-reduces over rings of one size: ``latency_s + bytes / bandwidth``."""

    ranks: int
    rings: int
    """How many such rings were busy at once, over the same VMs."""
    between_vms: bool
    latency_s: float
    """Of the whole all-reduce, without its bytes."""
    bandwidth_bytes_per_s: float
    """Bytes of the tensor over the time that they add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Primitives that depend on neither P, D nor the number of GPUs (Varuna, 4.3)."""

    fingerprint: str
    """Of the model, as in ``ModelFacts``."""
    device: str
    """What was measured, such as the name of the GPU."""
    software: str
    """Versions that the times depend on."""
    microbatches: tuple[MicrobatchProfile, ...]
    """By ascending micro-batch size."""
    optimizer_s_per_byte: float
    """Time of the optimizer step over the bytes of the parameters it updates."""
    within_vm: LinkProfile
    between_vms: LinkProfile
    rings: tuple[RingProfile, ...] = ()
    """Empty: all-reduces are reckoned from the links."""
    task_overhead_s: float = 0.0
    """What a task takes beyond its sections' own time: bookkeeping, posting messages."""
    origin: Literal["measured", "derived", "written"] = "measured"
    """``derived``: from a measured one by a declared ratio; ``written``: by hand."""
    sources: tuple[str, ...] = ()
    """Where the numbers of a derived or written profile are from."""
    schema_version: int = SCHEMA_VERSION

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that it knows, ascending."""
        return tuple(one.microbatch_size for one in self.microbatches)

    def sections_at(self, microbatch_size: int) -> tuple[SectionProfile, ...]:
        """Return all sections at a micro-batch size.

        Raises:
            WireError: The profile does not know that size.
        """
        for one in self.microbatches:
            if one.microbatch_size == microbatch_size:
                return one.sections
        raise WireError(
            f"the profile knows micro-batches of {self.microbatch_sizes}: got "
            f"{microbatch_size}; calibrate again"
        )


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """One GPU (or CPU slot) of one VM."""

    vm_id: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The immutable answer: who computes what (design: the words).

    Rank ``replica * pipeline_depth + stage`` runs on ``slots[rank]``. The model is cut
    into ``pipeline_depth * chunks`` runs of sections, run ``k`` from ``stage_bounds[k]``
    up to ``stage_bounds[k + 1]``; stage ``p`` owns runs ``p``, ``p + pipeline_depth``
    and so on. Replica ``d`` computes virtual nodes ``replica_bounds[d]`` up to
    ``replica_bounds[d + 1]``. An interleaved plan has two stages and more, follows its
    lists to the letter, hence without a bound of its own, and gives every replica a
    multiple of ``pipeline_depth`` virtual nodes.
    """

    pipeline_depth: int
    data_parallel_width: int
    microbatch_size: int
    minibatch_size: int
    schedule: ScheduleKind
    recompute: bool
    stage_bounds: tuple[int, ...]
    replica_bounds: tuple[int, ...]
    slots: tuple[Slot, ...]
    predicted_step_s: float
    in_flight_bound: int | None = None
    """Most micro-batches in flight on any stage; ``None``: what its schedule needs."""
    chunks: int = 1
    """Runs of sections that each stage has; more than one if interleaved."""
    devices_per_stage_replica: int = 1
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        depth, width = self.pipeline_depth, self.data_parallel_width
        good = (
            depth >= 1
            and width >= 1
            and self.microbatch_size >= 1
            and self.minibatch_size % self.microbatch_size == 0
            and _is_cover(self.stage_bounds, depth * self.chunks)
            and (self._interleaves() if self.chunks > 1 else self.chunks == 1)
            and (self.schedule == "interleaved") == (self.chunks > 1)
            and (self.in_flight_bound is None or self.in_flight_bound >= 1)
            and _is_cover(self.replica_bounds, width)
            and self.replica_bounds[-1] == self.minibatch_size // self.microbatch_size
            and len(set(self.slots)) == len(self.slots) == depth * width
            and self.devices_per_stage_replica == 1
        )
        if not good:
            raise WireError(f"plan does not add up: {self}")

    def _interleaves(self) -> bool:
        """Whether stages of several runs of sections can be run."""
        return (
            self.chunks <= MOST_CHUNKS
            and self.pipeline_depth > 1
            and self.in_flight_bound is None
            and all(nodes % self.pipeline_depth == 0 for nodes in self.replica_bounds)
        )

    @property
    def num_sections(self) -> int:
        """Sections of the whole model."""
        return self.stage_bounds[-1]

    @property
    def shape(self) -> str:
        """``PxD`` for people."""
        return f"{self.pipeline_depth}x{self.data_parallel_width}"

    def stage_of(self, section: int) -> int:
        """Return the stage that owns ``section``."""
        return (
            bisect.bisect_right(self.stage_bounds, section) - 1
        ) % self.pipeline_depth

    def runs_of(self, stage: int) -> tuple[range, ...]:
        """Return the runs of consecutive sections of ``stage``, one a chunk."""
        bounds = self.stage_bounds
        return tuple(
            range(bounds[k], bounds[k + 1])
            for k in range(stage, len(bounds) - 1, self.pipeline_depth)
        )

    def sections_of(self, stage: int) -> tuple[int, ...]:
        """Return the sections of ``stage``."""
        return tuple(section for run in self.runs_of(stage) for section in run)

    def virtual_nodes_of(self, replica: int) -> range:
        """Return the virtual nodes that ``replica`` computes."""
        return range(self.replica_bounds[replica], self.replica_bounds[replica + 1])


def _is_cover(bounds: tuple[int, ...], parts: int) -> bool:
    """Whether ``bounds`` cut 0…bounds[-1] into ``parts`` runs, none of them empty."""
    rising = all(a < b for a, b in itertools.pairwise(bounds))
    return len(bounds) == parts + 1 and bounds[0] == 0 and rising


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a VM must know of the job; the same for its whole life."""

    name: str
    entrypoint: str
    """``module:function`` in the user's workdir; the function returns a TrainingJob."""
    seed: int
    steps: int
    minibatch_size: int
    microbatch_size: int
    reduction: Reduction
    checkpoint_path: str
    checkpoint_every_steps: int
    checkpoint_keep: int
    lease_s: float
    heartbeat_s: float
    communication_timeout_s: float = 300.0
    """Bound on one collective; failures are found by heartbeats long before."""
    schema_version: int = SCHEMA_VERSION


# --- Commands: manager -> agent -> supervisor --------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialise:
    """Build the whole model once, write it as the checkpoint of step 0."""

    kind: Literal["initialise"] = "initialise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """Measure sections, links and all-reduces, all participants together, once.

    A round of measuring bears a negative number where training's generations bear
    positive ones: in ``OpenStore``, and in all reports of it. A newer round, of a lower
    number, ends the one before.
    """

    generation: int = -1
    participants: tuple[Slot, ...] = ()
    """Ranks. A slot that comes twice computes once, but sends and receives as two. None
    at all: the first slot of who is told so, alone and without a store."""
    store_host: str = ""
    store_port: int = 0
    microbatch_sizes: tuple[int, ...] = ()
    """What to measure, ascending; none: that of the job."""
    checkpoint: str = ""
    """Where sections are read from; without it every rank builds the whole model."""
    kind: Literal["calibrate"] = "calibrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """Fork the rendezvous store of a generation on this VM."""

    generation: int
    kind: Literal["open_store"] = "open_store"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGeneration:
    """Hand sections over, then train by ``plan`` until stopped or done.

    ``participants`` are the ranks of the plan followed by donors: slots that have no
    part in the plan but may hold the newest copy of a section.
    """

    generation: int
    plan: Plan
    participants: tuple[Slot, ...]
    store_host: str
    store_port: int
    checkpoint: str
    """Newest complete checkpoint, for sections that no participant holds."""
    evaluate_first: bool
    """Whether the held-out loss of the very first weights is still to be measured."""
    kind: Literal["run_generation"] = "run_generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGeneration:
    """Stop all ranks after the same mini-batch."""

    generation: int
    checkpoint: bool
    """Write a checkpoint at that mini-batch, before reporting ``GenerationStopped``."""
    kind: Literal["stop_generation"] = "stop_generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMinibatch:
    """Share the mini-batch anew over the replicas of a generation, without a morph.

    All ranks change over before the same mini-batch, once all of them know the same
    newest share; one for a generation that does not run is ignored.
    """

    generation: int
    number: int
    """From 1, grows within the generation: the highest is the newest."""
    replica_bounds: tuple[int, ...]
    """As in ``Plan``."""
    kind: Literal["share_minibatch"] = "share_minibatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonGeneration:
    """Kill the workers of this VM that still run ``generation`` or an older one."""

    generation: int
    kind: Literal["abandon_generation"] = "abandon_generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """End every process of this VM that is ours; the agent exits last."""

    kind: Literal["retire"] = "retire"


Command = (
    Initialise
    | Calibrate
    | OpenStore
    | RunGeneration
    | StopGeneration
    | ShareMinibatch
    | AbandonGeneration
    | Retire
)


# --- Reports: worker -> supervisor -> agent -> manager -------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorReady:
    """The supervisor has imported torch and the user's module and can fork."""

    num_slots: int
    torch_version: str
    device: str = ""
    """As in ``Profile``."""
    software: str = ""
    """As in ``Profile``."""
    machine: str = ""
    """The computer that the VM is on: the same for VMs that share one. Empty: unknown."""
    cores: int = 0
    """Cores of it that may be used; 0: unknown."""
    kind: Literal["supervisor_ready"] = "supervisor_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationProgress:
    """A round of measuring has come so far, as its first rank sees it."""

    generation: int
    done: int
    total: int
    what: str
    """What was measured last."""
    kind: Literal["calibration_progress"] = "calibration_progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The profile that ``Calibrate`` asked for, from its first rank."""

    profile: Profile
    generation: int = -1
    kind: Literal["calibrated"] = "calibrated"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened:
    """The rendezvous store of ``generation`` listens."""

    generation: int
    host: str
    port: int
    kind: Literal["store_opened"] = "store_opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted:
    """A slot has its sections and trains."""

    generation: int
    slot: int
    pid: int
    step: int
    """Mini-batches applied so far."""
    outcome: Literal["same", "adopted", "dropped", "restored"]
    """What the first exchange decided about the mini-batch that was in the air."""
    sections_moved: int
    """Sections this slot received from another slot's memory."""
    sections_loaded: int
    """Sections this slot read from the checkpoint store."""
    kind: Literal["generation_started"] = "generation_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchCommitted:
    """A slot has applied a mini-batch to all its sections."""

    generation: int
    slot: int
    step: int
    """Mini-batches applied so far, this one included."""
    sections: tuple[int, ...]
    loss: float
    grad_norm: float
    step_s: float
    peak_bytes: int
    """Tracked tensor bytes at their highest (sections, stash, activations)."""
    busy_s: float = 0.0
    """Time inside forwards, recomputes and backwards of this mini-batch."""
    microbatches: int = 0
    """Micro-batches that the slot computed in this mini-batch; 0: not told."""
    recomputes: int = 0
    """Recomputes among its tasks: those whose graph was kept are left out."""
    tasks_s: float = 0.0
    """From the beginning of the mini-batch until the slot's last task was done."""
    kind: Literal["minibatch_committed"] = "minibatch_committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Held-out loss of the weights after ``step`` mini-batches."""

    generation: int
    step: int
    loss: float
    kind: Literal["evaluated"] = "evaluated"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStopped:
    """A slot stopped as asked, or because all steps are done, or because it is a donor
    that has handed its sections over; its memory stays."""

    generation: int
    slot: int
    step: int
    done: bool
    """Whether all steps of the job are committed."""
    kind: Literal["generation_stopped"] = "generation_stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBroken:
    """A slot left the generation with an error; its memory stays."""

    generation: int
    slot: int
    reason: str
    kind: Literal["generation_broken"] = "generation_broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDied:
    """A worker process ended; the memory that the supervisor holds stays.

    A process that initialises is told as slot 0 of generation 0, one that calibrates
    with the number of its round.
    """

    generation: int
    slot: int
    reason: str
    kind: Literal["worker_died"] = "worker_died"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCodeFailed:
    """The user's own code raised: the job cannot go on."""

    message: str
    traceback: str
    kind: Literal["user_code_failed"] = "user_code_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """The manifest of a checkpoint is in place."""

    name: str
    step: int
    kind: Literal["checkpoint_saved"] = "checkpoint_saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """A checkpoint could not be written; the one before stays valid."""

    step: int
    reason: str
    kind: Literal["checkpoint_failed"] = "checkpoint_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged:
    """A checkpoint could not be read back; it must not be chosen again."""

    name: str
    reason: str
    kind: Literal["checkpoint_damaged"] = "checkpoint_damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionNoticed:
    """The cloud announced that this VM goes away in ``lead_s`` seconds."""

    lead_s: float
    kind: Literal["interruption_noticed"] = "interruption_noticed"


Report = (
    SupervisorReady
    | CalibrationProgress
    | Calibrated
    | StoreOpened
    | GenerationStarted
    | MinibatchCommitted
    | Evaluated
    | GenerationStopped
    | GenerationBroken
    | WorkerDied
    | UserCodeFailed
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointDamaged
    | InterruptionNoticed
)


# --- Agent <-> manager, over HTTPS ----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The first thing an agent says."""

    vm_id: str
    software_version: str
    num_slots: int
    private_address: str
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """An agent is alive; answered at once if commands wait, else after a while."""

    vm_id: str
    sequence: int
    """Grows with every heartbeat of one agent process; a stale one is refused."""
    received: int
    """Number of commands received so far; the manager sends what comes after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    """Commands that the agent has not had yet, in order."""

    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportBatch:
    """Reports in the order in which they were made."""

    vm_id: str
    first: int
    """Number of the first report in the batch, from 0, counted over the agent's life;
    the manager drops what it has had already."""
    reports: tuple[Report, ...]


# --- JSON ------------------------------------------------------------------------------

Message = TypeVar("Message")


def encode(message: Any) -> str:
    """Return a message as one line of JSON."""
    return json.dumps(dataclasses.asdict(message), separators=(",", ":"))


def decode(cls: Any, text: str | bytes) -> Any:
    """Return the ``cls`` (a dataclass or a union of them) that ``text`` encodes.

    Raises:
        WireError: ``text`` is not JSON or does not fit ``cls``.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise WireError(f"message is not JSON: {error}") from None
    return from_data(cls, data)


def from_data(cls: Any, data: Any) -> Any:
    """Like ``decode``, from parsed JSON."""
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if version is not None and version != SCHEMA_VERSION:
        raise WireError(
            f"schema_version must be {SCHEMA_VERSION}: got {version!r}; "
            "run the same version of spottrain everywhere"
        )
    return _build(cls, data, "message")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(hint: Any, data: Any, where: str) -> Any:
    """Return ``data`` as the type ``hint``; ``where`` names the place in errors."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _build_union(get_args(hint), data, where)
    if origin is Literal:
        if data in get_args(hint):
            return data
    elif origin is tuple:
        if isinstance(data, (list, tuple)):
            item = get_args(hint)[0]
            return tuple(_build(item, x, f"{where}[{i}]") for i, x in enumerate(data))
    elif dataclasses.is_dataclass(hint):
        if isinstance(data, Mapping):
            return _build_dataclass(hint, data, where)
    elif hint is float:
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return float(data)
    elif type(data) is hint:
        return data
    raise WireError(f"{where} must be {getattr(hint, '__name__', hint)}: got {data!r}")


def _build_union(members: tuple[Any, ...], data: Any, where: str) -> Any:
    """Choose the member whose ``kind`` fits, or ``None``."""
    if data is None and type(None) in members:
        return None
    classes = [m for m in members if dataclasses.is_dataclass(m)]
    if isinstance(data, Mapping) and "kind" in data:
        for member in classes:
            if data["kind"] in get_args(_hints(typing.cast(type, member))["kind"]):
                return _build(member, data, where)
        raise WireError(f"{where}.kind is unknown: got {data['kind']!r}")
    plain = [m for m in members if m is not type(None)]
    if len(plain) == 1:
        return _build(plain[0], data, where)
    raise WireError(f"{where} must be an object with a kind: got {data!r}")


def _build_dataclass(cls: Any, data: Mapping[str, Any], where: str) -> Any:
    hints = _hints(cls)
    if unknown := sorted(set(data) - set(hints)):
        raise WireError(f"{where}.{unknown[0]} is not a field of {cls.__name__}")
    required = {
        f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING
    }
    if missing := sorted(required - set(data)):
        raise WireError(f"{where}.{missing[0]} is missing from {cls.__name__}")
    return cls(**{k: _build(hints[k], v, f"{where}.{k}") for k, v in data.items()})
