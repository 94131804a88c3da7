"""The plan of a generation: which slots compute what.

What it is made from, the model as inspected and measured, is in ``wire.model``.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spottrain.codec import SCHEMA_VERSION
from spottrain.errors import WireError
from spottrain.wire.model import Network, StateHome

ScheduleKind = Literal["varuna", "1f1b", "gpipe", "interleaved"]
Semantics = Literal["synchronous", "stale_by_one"]
"""Weights at which the gradient of a mini-batch is taken: those it is applied to, or those
one mini-batch before, so that pipelines need not drain (PipeDream-2BW)."""
MAX_CHUNKS = 42
"""Runs of sections per stage; codes of more do not fit into a schedule's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """One GPU (or CPU slot) of one VM."""

    vm_id: str
    index: int


def shape_of(depth: int, width: int, tensor_parallel: int) -> str:
    """Return ``PxD``, or ``PxDxT`` where several slots divide the matrices of each stage."""
    return f"{depth}x{width}" + (f"x{tensor_parallel}" if tensor_parallel > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An immutable plan: assigns the computation to slots (design: the words).

    Rank ``pipeline * pipeline_depth + stage`` runs on ``slots[rank]``; each replica
    is ``devices_per_stage_replica`` pipelines, one after the other, which compute the same
    micro-batches together: those of a stage, in one VM, divide its matrices (tensor
    parallelism). Every rank runs all sections of its stage; which ranks hold a section, that is,
    have its committed state, says ``holders_of``. The model is cut into ``pipeline_depth *
    chunks`` runs of sections, run ``k`` from
    ``stage_bounds[k]`` up to ``stage_bounds[k + 1]``; stage ``p`` owns runs ``p``, ``p
    + pipeline_depth`` and so on. Replica ``d`` computes virtual nodes
    ``replica_bounds[d]`` up to ``replica_bounds[d + 1]``, in fast mode perhaps several of
    them as one micro-batch. An interleaved plan has two
    stages and more, follows its lists exactly, hence without a bound of its own, and
    gives every replica a multiple of ``pipeline_depth`` virtual nodes.
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
    """Where slots share cores: a lower bound."""
    predicted_max_s: float | None = None
    """Where slots share cores: what a mini-batch may take instead; ``None``: each slot has
    a core of its own, and ``predicted_step_s`` is expected."""
    in_flight_bound: int | None = None
    """Maximum micro-batches in flight on any stage; ``None``: as its schedule needs."""
    chunks: int = 1
    """Runs of sections that each stage has; more than one if interleaved."""
    devices_per_stage_replica: int = 1
    """Ranks that divide the matrices of a stage of a replica; see ``replica_of``. Several always
    share the state of their stage."""
    state: StateHome = "host"
    """Where workers on GPUs keep parameters, optimizer state and undo slot."""
    network: Network = "auto"
    """What sums gradients over replicas of workers on GPUs, where that was chosen."""
    links_on_devices: bool = False
    """Whether neighbours in one VM send from GPU to GPU, where they have one each."""
    segments: int = 1
    """In which each run of sections is recomputed, see ``segments_of``; 1: as a whole."""
    peer_copies: int = 0
    """Copies of each section that another VM keeps of an earlier mini-batch, 0 or 1; only
    where no replica has one of the present."""
    nodes_per_microbatch: tuple[int, ...] = ()
    """Virtual nodes that each replica computes at once, as one micro-batch; the last one of
    its share may have fewer. Empty: one each, as always in exact mode."""
    shared_state: tuple[int, ...] = ()
    """Bytes of each section's committed state, by which the ranks of a stage that are in one
    VM divide it among them (ZeRO-1, Rajbhandari et al. 2020, section 5.1, by whole sections);
    empty: each rank holds all sections that it runs."""
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
            and self.segments >= 1
            and (self.segments == 1 or self.recompute)
            and _is_cover(self.replica_bounds, width)
            and self.replica_bounds[-1] == self.minibatch_size // self.microbatch_size
            and self.devices_per_stage_replica >= 1
            and len(set(self.slots)) == len(self.slots) == depth * self.num_pipelines
            and (self.devices_per_stage_replica == 1 or self._divides_matrices())
            and (self.peer_copies == 0 or (self.peer_copies == self.num_pipelines == 1))
            and (not self.nodes_per_microbatch or self._merges())
            and (not self.shared_state or self._shares())
        )
        if not good:
            raise WireError(f"plan does not add up: {self}")

    def _interleaves(self) -> bool:
        """Return whether stages of several runs of sections can be run."""
        return (
            self.chunks <= MAX_CHUNKS
            and self.pipeline_depth > 1
            and self.in_flight_bound is None
            and all(nodes % self.pipeline_depth == 0 for nodes in self.replica_bounds)
        )

    def _merges(self) -> bool:
        """Return whether replicas can compute several virtual nodes at once."""
        each = self.nodes_per_microbatch
        return self.chunks == 1 and len(each) == self.data_parallel_width and min(each) >= 1

    def _shares(self) -> bool:
        """Return whether the bytes of all sections are known."""
        return len(self.shared_state) == self.num_sections and min(self.shared_state) >= 0

    def _divides_matrices(self) -> bool:
        """Return whether the ranks that divide a stage's matrices are in one VM each, and share
        its state there."""
        groups = map(self.tensor_ranks, range(len(self.slots)))
        return (
            self.chunks == 1
            and len(self.shared_state) > 0
            and all(len({self.slots[rank].vm_id for rank in ranks}) == 1 for ranks in groups)
        )

    @property
    def num_sections(self) -> int:
        """Sections of the whole model."""
        return self.stage_bounds[-1]

    @property
    def shape(self) -> str:
        """For people, see ``shape_of``."""
        depth, width = self.pipeline_depth, self.data_parallel_width
        return shape_of(depth, width, self.devices_per_stage_replica)

    @property
    def num_pipelines(self) -> int:
        """Ranks that run each stage."""
        return self.data_parallel_width * self.devices_per_stage_replica

    def replica_of(self, rank: int) -> int:
        """Return the replica that a rank computes in."""
        return rank // self.pipeline_depth // self.devices_per_stage_replica

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that divide the matrices of a stage with ``rank``, itself included."""
        depth, size = self.pipeline_depth, self.devices_per_stage_replica
        first = self.replica_of(rank) * size * depth + rank % depth
        return tuple(range(first, first + size * depth, depth))

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that run ``stage``, in the order of pipelines."""
        return tuple(range(stage, len(self.slots), self.pipeline_depth))

    def sharers_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks in the VM of ``rank`` that run its stage, itself included."""
        vm_id, ranks = self.slots[rank].vm_id, self.stage_ranks(rank % self.pipeline_depth)
        return tuple(one for one in ranks if self.slots[one].vm_id == vm_id)

    def holders_of(self, section: int) -> tuple[int, ...]:
        """Return the ranks that have the committed state of ``section``, in order.

        Those that run it; where state is shared, one in each VM of these.
        """
        held = self.held_on(self.stage_of(section))
        return tuple(rank for rank, sections in held.items() if section in sections)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Return the sections whose committed state ``rank`` has; where state is shared,
        perhaps none."""
        return self.held_on(rank % self.pipeline_depth)[rank]

    def held_on(self, stage: int) -> dict[int, tuple[int, ...]]:
        """Return the sections whose committed state each rank of ``stage`` has."""
        sections, ranks = self.sections_of(stage), self.stage_ranks(stage)
        if not self.shared_state:
            return dict.fromkeys(ranks, sections)
        sharers: dict[str, list[int]] = {}
        for rank in ranks:
            sharers.setdefault(self.slots[rank].vm_id, []).append(rank)
        weights = {k: self.shared_state[k] for k in sections}
        dealt = {parts: deal(weights, parts) for parts in set(map(len, sharers.values()))}
        own = {rank: sharers[self.slots[rank].vm_id] for rank in ranks}
        return {rank: dealt[len(own[rank])][own[rank].index(rank)] for rank in ranks}

    def writer_of(self, section: int) -> int:
        """Return the rank that writes ``section`` to checkpoints: holders take turns."""
        holders = self.holders_of(section)
        return holders[section % len(holders)]

    def stage_of(self, section: int) -> int:
        """Return the stage that runs ``section``."""
        run = bisect.bisect_right(self.stage_bounds, section) - 1
        return run % self.pipeline_depth

    def runs_of(self, stage: int) -> tuple[range, ...]:
        """Return the runs of consecutive sections of ``stage``, one per chunk."""
        bounds = self.stage_bounds
        return tuple(
            range(bounds[k], bounds[k + 1])
            for k in range(stage, len(bounds) - 1, self.pipeline_depth)
        )

    def sections_of(self, stage: int) -> tuple[int, ...]:
        """Return the sections of ``stage``."""
        return tuple(section for run in self.runs_of(stage) for section in run)

    @property
    def copies(self) -> int:
        """How many VMs hold each stage, at least: 1 where a VM may not be lost without one."""
        depth = self.pipeline_depth
        return min(len({slot.vm_id for slot in self.slots[p::depth]}) for p in range(depth))

    @property
    def rests_on_one_vm(self) -> bool:
        """Whether there are several replicas, and one VM holds a stage of all of them."""
        return self.copies == 1 < self.data_parallel_width

    @property
    def copy_holders(self) -> tuple[int, ...]:
        """The rank that keeps the copies of each rank's sections; empty: there are none.

        Always one of another VM: of those that keep the fewest, the next one.
        """
        if not self.peer_copies or len({slot.vm_id for slot in self.slots}) < 2:
            return ()
        kept, holders, size = Counter[int](), list[int](), len(self.slots)
        for rank, slot in enumerate(self.slots):
            holder = min(
                (r for r, other in enumerate(self.slots) if other.vm_id != slot.vm_id),
                key=lambda r: (kept[r], (r - rank) % size),
            )
            kept[holder] += 1
            holders.append(holder)
        return tuple(holders)

    def virtual_nodes_of(self, replica: int) -> range:
        """Return the virtual nodes that ``replica`` computes."""
        return range(self.replica_bounds[replica], self.replica_bounds[replica + 1])

    def microbatches_of(self, replica: int) -> tuple[range, ...]:
        """Return the virtual nodes of each micro-batch of ``replica``, in order."""
        nodes, size = self.virtual_nodes_of(replica), self._nodes_at_once(replica)
        return tuple(nodes[at : at + size] for at in range(0, len(nodes), size))

    def microbatch_size_of(self, replica: int) -> int:
        """Return the examples of each micro-batch of ``replica`` but perhaps the last."""
        return self.microbatch_size * self._nodes_at_once(replica)

    def _nodes_at_once(self, replica: int) -> int:
        return self.nodes_per_microbatch[replica] if self.nodes_per_microbatch else 1


def deal(weights: Mapping[int, int], parts: int) -> list[tuple[int, ...]]:
    """Divide sections by weight: the heaviest first, each to the part that has least so far.

    Args:
        weights: Of each section.
        parts: How many; if there are fewer sections, the last ones are empty.
    """
    loads, dealt = [0] * parts, [list[int]() for _ in range(parts)]
    for section in sorted(weights, key=lambda k: (-weights[k], k)):
        least = min(range(parts), key=lambda part: (loads[part], part))
        dealt[least].append(section)
        loads[least] += weights[section]
    return [tuple(sorted(part)) for part in dealt]


def segments_of(run: range, segments: int) -> tuple[range, ...]:
    """Cut a run of sections into segments of as many sections each, or nearly so.

    All but the last one are recomputed during the backward, one at a time from its input
    (``torch.utils.checkpoint.checkpoint_sequential``); of the last one the graph is kept,
    or made by the recompute before the backward.

    Args:
        run: Sections.
        segments: At most; no segment is empty.
    """
    count = min(segments, len(run))
    return tuple(run[len(run) * i // count : len(run) * (i + 1) // count] for i in range(count))


def _is_cover(bounds: tuple[int, ...], parts: int) -> bool:
    """Return whether ``bounds`` cut 0…bounds[-1] into ``parts`` non-empty runs."""
    rising = all(a < b for a, b in itertools.pairwise(bounds))
    return len(bounds) == parts + 1 and bounds[0] == 0 and rising
