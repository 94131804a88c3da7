"""Commands of the manager to agents, supervisors and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spottrain.wire.codec import SCHEMA_VERSION
from spottrain.wire.model import Plan, Reduction, Slot


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
    checkpoint_keep: int
    lease_s: float
    heartbeat_s: float
    communication_timeout_s: float = 300.0
    """Bound on one collective; failures are found by heartbeats long before."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialise:
    """Build the whole model once, write it as the checkpoint of step 0."""

    kind: Literal["initialise"] = "initialise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """Measure sections, links and all-reduces, all participants together, once.

    A calibration round has a negative number where training's generations have positive
    ones: in ``OpenStore``, and in all reports of it. A newer round, of a lower number,
    ends the one before.
    """

    generation: int = -1
    participants: tuple[Slot, ...] = ()
    """Ranks. A slot that comes twice computes once, but sends and receives as two. None
    at all: the first slot of the VM that gets the command, alone and without a
    store."""
    store_host: str = ""
    store_port: int = 0
    microbatch_sizes: tuple[int, ...] = ()
    """Sizes to measure, ascending; none: that of the job."""
    checkpoint: str = ""
    """Checkpoint that sections are read from; without it every rank builds the whole
    model."""
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
    """True if the held-out loss of the very first weights is still to be measured."""
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
    """Rebalance the mini-batch over the replicas of a generation, without a morph.

    All ranks switch before the same mini-batch, once all of them know the same newest
    share; one for a generation that does not run is ignored.
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
