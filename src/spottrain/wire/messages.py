"""Messages between manager, agent, supervisor and worker.

    manager --Command--> agent --Command--> supervisor --> worker
    manager <--Report--- agent <--Report--- supervisor <-- worker

Agent and manager exchange them over HTTPS, in heartbeats and batches of reports; the file
of a ``TraceWritten`` is posted by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spottrain.codec import SCHEMA_VERSION, Message
from spottrain.wire.model import (
    AUTO_LOADER,
    GpuFacts,
    GpuUse,
    LoaderSpec,
    Network,
    Precision,
    Profile,
    Reduction,
    WireType,
    WorkerState,
)
from spottrain.wire.numerics import Numerics
from spottrain.wire.plan import Plan, Semantics, Slot

DeviceChoice = Literal["auto", "gpu", "cpu"]
"""What workers compute on; ``auto``: on GPUs where a VM has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """When held-out sets are evaluated, and what follows from it."""

    every_steps: int = 0
    """0: only before the first and after the last step."""
    metric: str = ""
    """Decides which checkpoint is the best one, as ``set/metric``; empty: the loss of
    the first set."""
    goal: Literal["min", "max"] = "min"
    """Whether the least or the largest value is the best."""
    patience: int = 0
    """Evaluations in a row without improvement after which training stops; 0: never."""
    min_delta: float = 0.0
    """Least change that is an improvement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Settings of the job that a VM needs; the same for its whole life."""

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
    """0: as losses and the cost of a checkpoint ask for."""
    checkpoint_keep: int
    lease_s: float
    heartbeat_s: float
    device: DeviceChoice = "auto"
    precision: Precision = "fp32"
    network: Network = "auto"
    wire: WireType = "own"
    evaluation: EvaluationSpec = EvaluationSpec()
    init_from: str = ""
    """SHA-256 of the weights that the job began with; empty: those that the user's
    ``model`` makes."""
    loader: LoaderSpec = AUTO_LOADER
    semantics: Semantics = "synchronous"
    sequence_parallel: bool = False
    """Whether ranks that divide matrices divide the sequence between them, too."""
    selective_recompute: bool = False
    """Whether blocks keep for their backward but what is dear to compute again."""
    uid: str = ""
    """Of the job, which marks its checkpoints and their store; empty: nothing is marked."""
    secrets: tuple[str, ...] = ()
    """Environment variables whose values are neither logged nor reported."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMessage(Message):
    """The base of messages about one generation, or one round before training."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMessage(GenerationMessage):
    """The base of messages about a slot's part in it."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommand(Message):
    """Do something before training, all participants together.

    A round has a negative number where training's generations have positive ones: in
    ``OpenStore``, and in all reports of it. A newer round, of a lower number, ends the one
    before.
    """

    generation: int = -1
    participants: tuple[Slot, ...] = ()
    """Ranks. None at all: the first slot of the VM that gets the command, alone and without a
    store."""
    store_host: str = ""
    store_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialise(RoundCommand):
    """Write the first weights as the checkpoint of step 0: each an even run of sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate(RoundCommand):
    """Measure sections, links and all-reduces, once.

    A slot that comes twice computes once, but sends and receives as two.
    """

    microbatch_sizes: tuple[int, ...] = ()
    """Sizes to measure, ascending; none: that of the job."""
    tensor_sizes: tuple[int, ...] = ()
    """Numbers of slots of a VM that may divide matrices, ascending: sections are measured in
    groups of these, too, as far as the largest VM has slots."""
    checkpoint: str = ""
    """Checkpoint that sections are read from; without it every rank builds its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore(GenerationMessage):
    """Fork the rendezvous store of a generation on this VM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGeneration(GenerationMessage):
    """Hand sections over, then train by ``plan`` until stopped or done.

    ``participants`` are the ranks of the plan followed by donors: slots that have no
    part in the plan but may hold the newest copy of a section.
    """

    plan: Plan
    participants: tuple[Slot, ...]
    store_host: str
    store_port: int
    checkpoint: str
    """Newest complete checkpoint, for sections that no participant holds."""
    evaluate_first: bool
    """True if the held-out loss of the very first weights is still to be measured."""
    checkpoint_losses_per_s: float = 0.0
    """Rate of losses that would undo all since the newest checkpoint."""
    checkpoint_cost_s: float = 0.0
    """Training time that a checkpoint cost so far; 0: none was measured."""
    copy_losses_per_s: float = 0.0
    """Rate of losses that would undo all since the newest copies on other VMs."""
    save_only: bool = False
    """Write a checkpoint after the handover, then stop: no code of the user's runs."""
    known_models: tuple[str, ...] = ()
    """Fingerprints of earlier code of the job, whose checkpoints fit the present one."""
    code: str = ""
    """SHA-256 of the packed workdir; empty: unknown."""
    numerics: Numerics | None = None
    """In exact mode: those of the plan and of its VMs, which a checkpoint must have, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGeneration(GenerationMessage):
    """Stop all ranks after the same mini-batch."""

    checkpoint: bool
    """Write a checkpoint at that mini-batch, before reporting ``GenerationStopped``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMinibatch(GenerationMessage):
    """Rebalance the mini-batch over the replicas of a generation, without a morph.

    All ranks switch before the same mini-batch, once all of them know the same newest
    share; one for a generation that does not run is ignored.
    """

    number: int
    """From 1, grows within the generation: the highest is the newest."""
    replica_bounds: tuple[int, ...]
    """As in ``Plan``."""


TraceContent = Literal["profile", "timeline"]
"""What is recorded of mini-batches: all that ``torch.profiler`` sees, as a Chrome trace, or
when tasks and messages were, as a ``RankTimeline``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMinibatches(GenerationMessage):
    """Record what every rank of a generation does in its next mini-batches.

    All ranks begin before the same mini-batch, once all of them know it; one for a
    generation that does not run is ignored. It changes nothing that is computed.
    """

    number: int
    """Grows over the job's life: a higher one follows those before."""
    minibatches: int
    content: TraceContent = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonGeneration(GenerationMessage):
    """Kill the workers of this VM that still run ``generation`` or an older one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWorkers(Message):
    """Kill the workers of some slots of this VM: they hang, or their GPU has reported an
    error, of which the agent tells its supervisor.

    Successors start as after any death of a worker.
    """

    slots: tuple[int, ...]
    reason: str
    hang: bool = False
    """Whether that is why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectWorkers(GenerationMessage):
    """Report what the workers of a generation do on this VM: none has committed for long.

    For the agent itself, which answers even if its supervisor hangs.
    """

    number: int
    """Of the inspection, from 1, within the generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire(Message):
    """End every process of this VM that is ours; the agent exits last."""


Command = (
    Initialise
    | Calibrate
    | OpenStore
    | RunGeneration
    | StopGeneration
    | ShareMinibatch
    | TraceMinibatches
    | AbandonGeneration
    | EndWorkers
    | InspectWorkers
    | Retire
)


@dataclass(frozen=True, kw_only=True)  # no slots: a ``VmRecord`` is copied at once
class Hardware:
    """What a VM computes on, as its supervisor has found it."""

    device: str = ""
    """As in ``Profile``."""
    software: str = ""
    """As in ``Profile``."""
    machine: str = ""
    """The computer that the VM is on: the same for VMs that share one. Empty: unknown."""
    cores: int = 0
    """Cores of it that may be used; 0: unknown."""
    gpus: tuple[GpuFacts, ...] = ()
    """The GPUs that its slots drive; none: slots compute on CPUs."""
    gpu_memory_bytes: int = 0
    """Least memory that a slot has on its GPU; 0: as the offer says."""
    memory_bytes: int = 0
    """Of the machine, beside GPUs'; 0: as the offer says."""
    locked_memory_bytes: int = 0
    """What each process may page-lock of it; 0: there is no limit, or it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorReady(Hardware, Message):
    """The supervisor has imported torch and the user's module and can fork."""

    num_slots: int
    torch_version: str
    warnings: tuple[str, ...] = ()
    """What people should know of this VM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPrepared(GenerationMessage):
    """A participant has come on with a section: in a round it has written its first weights,
    or has it in memory to measure; in a generation that starts, to train."""

    section: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationProgress(GenerationMessage):
    """Progress of a calibration round, as its first rank sees it."""

    done: int
    total: int
    what: str
    """Last measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated(Message):
    """The profile that ``Calibrate`` asked for, from its first rank."""

    profile: Profile
    generation: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened(GenerationMessage):
    """The rendezvous store of ``generation`` listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted(SlotMessage):
    """A slot has its sections and trains."""

    pid: int
    step: int
    """Mini-batches applied so far."""
    outcome: Literal["same", "adopted", "dropped", "restored"]
    """Decision of the first exchange about the mini-batch that was in flight."""
    sections_moved: int
    """Sections this slot received from another slot's memory."""
    sections_loaded: int
    """Sections this slot read from the checkpoint store."""


SkipReason = Literal["", "loss", "gradients", "scale", "weight"]
"""Why a mini-batch changed no parameter: its loss or its gradients were not finite, fp16's
loss scale was too large and backs off, which is no sign of trouble, or its weights sum up to
zero, as where all labels are masked. Empty: it changed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The weighted mean of something that the user's loss returns besides the loss."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchResult(GenerationMessage):
    """What came of a mini-batch."""

    step: int
    """Mini-batches applied so far, this one included."""
    loss: float
    grad_norm: float
    weight: float = 0.0
    """Sum of the loss's weights, such as the number of tokens; 0: not reported."""
    learning_rate: float | None = None
    """Of the optimizer's first group; ``None``: the slot trains nothing."""
    metrics: tuple[Metric, ...] = ()
    """In the order of their names."""
    skipped: SkipReason = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchCommitted(MinibatchResult):
    """A slot has applied a mini-batch to all its sections."""

    slot: int
    sections: tuple[int, ...]
    step_s: float
    peak_bytes: int
    """Tracked tensor bytes at their highest (sections, stash, activations)."""
    busy_s: float = 0.0
    """Time inside forwards, recomputes and backwards of this mini-batch."""
    microbatches: int = 0
    """Micro-batches that the slot computed in this mini-batch; 0: not reported."""
    recomputes: int = 0
    """Recomputes among its tasks: those whose graph was kept are left out."""
    tasks_s: float = 0.0
    """From the beginning of the mini-batch until the slot's last task was done."""
    checkpoint_every_steps: int = 0
    """Mini-batches between checkpoints as they are chosen now; 0: the job file says."""
    checkpoint_cost_s: float = 0.0
    """Training time that a checkpoint costs; 0: not measured."""
    copied_step: int | None = None
    """The newest step of which another VM has a copy of every section; ``None``: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchAdopted(MinibatchResult):
    """A mini-batch of an earlier generation that survivors have brought to its end.

    Whoever committed it may have died before reporting it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(GenerationMessage):
    """Loss and metrics of a held-out set, of the weights after ``step`` mini-batches."""

    step: int
    loss: float
    name: str = "heldout"
    """Of the set."""
    metrics: tuple[Metric, ...] = ()
    is_best: bool = False
    """The set's metric that the job file names is the best one so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStopped(SlotMessage):
    """A slot stopped: asked to, done, or a donor after the handover; its memory
    stays."""

    step: int
    done: bool
    """True if all steps of the job are committed, or training has stopped early."""
    early: str = ""
    """Why training stopped before the job's last step; empty: it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBroken(SlotMessage):
    """A slot left the generation with an error; its memory stays."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDied(SlotMessage):
    """A worker process ended; the memory that the supervisor holds stays.

    One that takes part in a round is reported with the number of that.
    """

    reason: str
    hung: bool = False
    """Whether it was killed because it hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersInspected(GenerationMessage):
    """The answer to ``InspectWorkers``."""

    number: int
    workers: tuple[WorkerState, ...]
    """Those that take part in the generation."""


MemoryUse = Literal["forward", "recompute", "backward", "update", "handover", "evaluation", "start"]
"""What a worker was doing when its device had no memory left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(SlotMessage):
    """A slot's device had no memory left; that the slot is out is reported besides."""

    section: int | None
    """The one that was computed or updated; None: none in particular."""
    microbatch_size: int
    requested_bytes: int
    """That could not be had; 0: unknown."""
    device_bytes: int
    """Memory of the device, or the slot's share of it."""
    during: MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclFailed(SlotMessage):
    """NCCL did not start in a slot or failed later, and no peer was known to be gone; that
    the slot is out is reported besides."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCodeFailed(Message):
    """The user's own code raised: the job cannot go on."""

    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Message):
    """The manifest of a checkpoint is in place."""

    name: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Message):
    """A checkpoint could not be written; the one before stays valid."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged(Message):
    """A file of a checkpoint is missing, or not as it was written; the manager verifies."""

    name: str
    reason: str
    file: str = ""
    """Its name in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUnreachable(Message):
    """This VM cannot read a checkpoint now, which says nothing of the checkpoint."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionNoticed(Message):
    """The cloud announced that this VM will be preempted in ``lead_s`` seconds."""

    lead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionCancelled(Message):
    """The cloud withdrew its announcement: this VM stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionLikely(Message):
    """The cloud says that this VM is likelier than others to be preempted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmUnfit(Message):
    """This VM cannot do what it was rented for, as its driver is missing or too old."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VmFailed(Message):
    """The agent ends, and its VM with it: the last thing that it says."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSick(Message):
    """A GPU of this VM has failed, or the driver asks for its recovery."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuThrottled(Message):
    """A GPU of this VM computes slower than it could, or no longer does."""

    reason: str
    """Such as thermal slowdown; empty: it is as fast as it can be again."""


Report = (
    SupervisorReady
    | SectionPrepared
    | CalibrationProgress
    | Calibrated
    | StoreOpened
    | GenerationStarted
    | MinibatchCommitted
    | MinibatchAdopted
    | Evaluated
    | GenerationStopped
    | GenerationBroken
    | WorkerDied
    | WorkersInspected
    | OutOfMemory
    | NcclFailed
    | UserCodeFailed
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointDamaged
    | CheckpointUnreachable
    | InterruptionNoticed
    | InterruptionCancelled
    | InterruptionLikely
    | VmUnfit
    | VmFailed
    | GpuSick
    | GpuThrottled
)


Measurement = MinibatchCommitted | MinibatchAdopted
"""Reports that are measurements: no decision depends on a single one of them. All others
are facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measurement, and its place among the agent's facts."""

    after: int
    """Facts that were reported before it, over the agent's life."""
    report: Measurement


MAX_TRACE_BYTES = 64 * 1024**2
"""Of one rank's trace, compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWritten(Message):
    """A rank's trace is in a file on its VM, for the agent to send and to remove.

    The agent sends it before the reports that were made after it.
    """

    number: int
    """Of ``TraceMinibatches``."""
    rank: int
    first_step: int
    """Mini-batches applied when it began."""
    last_step: int
    """Mini-batches applied when it ended."""
    path: str
    """What was asked for, compressed by gzip; empty: there is none."""
    reason: str = ""
    """Why there is none."""


SupervisorReport = Report | TraceWritten
"""What an agent hears from its supervisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """First message of an agent."""

    vm_id: str
    software_version: str
    """As ``version.software_version``: the manager takes agents of its own only."""
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
    gpus: tuple[GpuUse, ...] = ()
    """What the VM's GPUs do; no decision depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    """Commands that the agent has not had yet, in order."""

    commands: tuple[Command, ...]


MAX_LOGS_BYTES = 512 * 1024
"""Of the ends of a VM's logs as they are sent: three times 16 KiB, each byte escaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    """The end of one of a VM's logs."""

    name: str
    """Of the file."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTails:
    """The ends of a VM's logs that have changed: the VM may be gone before they are
    fetched."""

    vm_id: str
    logs: tuple[LogTail, ...]


MAX_BATCH_BYTES = 16 * 1024**2
"""Of a batch as it is sent. The longest report is a profile: 57 kB for 200 billion
parameters, times the number of micro-batch sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportBatch:
    """Reports in the order in which they were made: facts and measurements, each with
    numbers and acknowledgements of their own.

    A fact that is missing fences the VM, as decisions depend on it. If measurements are
    missing, the manager takes nothing of the batch and asks for them again.
    """

    vm_id: str
    first: int
    """Number of the first fact in the batch, from 0, counted over the agent's life;
    the manager drops what it has had already."""
    reports: tuple[Report, ...]
    """The facts. Agents of earlier versions send measurements among them."""
    first_measurement: int = 0
    """Number of the first measurement in the batch, from 0, over the agent's life."""
    oldest_measurement: int = 0
    """Number of the oldest one that the agent still has."""
    measurements: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAnswer:
    """What a manager has of one agent's reports."""

    received: int
    """Facts that are journalled, over the agent's life: it may forget them."""
    measured: int = 0
    """Measurements that are written: it may forget them, too."""
    next_measurement: int = 0
    """Number of the measurement that it should send next. Those from ``measured`` up to
    it may still be asked for again."""
