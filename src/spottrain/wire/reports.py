"""Reports of workers, supervisors and agents to the manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spottrain.wire.model import Profile


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
    """Progress of a calibration round, as its first rank sees it."""

    generation: int
    done: int
    total: int
    what: str
    """Last measurement."""
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
    """Decision of the first exchange about the mini-batch that was in flight."""
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
    """Micro-batches that the slot computed in this mini-batch; 0: not reported."""
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
    """A slot stopped: asked to, done, or a donor after the handover; its memory
    stays."""

    generation: int
    slot: int
    step: int
    done: bool
    """True if all steps of the job are committed."""
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

    A process that initialises is reported as slot 0 of generation 0, one that
    calibrates with the number of its round.
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
    """The cloud announced that this VM will be preempted in ``lead_s`` seconds."""

    lead_s: float
    kind: Literal["interruption_noticed"] = "interruption_noticed"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionCancelled:
    """The cloud withdrew its announcement: this VM stays."""

    kind: Literal["interruption_cancelled"] = "interruption_cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionLikely:
    """The cloud says that this VM is likelier than others to be preempted."""

    kind: Literal["interruption_likely"] = "interruption_likely"


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
    | InterruptionCancelled
    | InterruptionLikely
)
