"""Measures sections in groups of ranks that divide their matrices (tensor parallelism).

Groups are those of the VM with the most slots, all at the same time. Each of them measures some
sections, whose times stand for those of all that are like them. What comes into these is what
the ranks that measured them alone received.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from spottrain.activity import Activity
from spottrain.pipeline.calibrate.links import gather
from spottrain.pipeline.calibrate.sections import SectionBench, forget
from spottrain.pipeline.comm.p2p import Direction, PipelineLinks
from spottrain.pipeline.comm.tensor_group import TensorGroup
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.model.sequence_parallel import part_of
from spottrain.pipeline.model.stage import Activations
from spottrain.pipeline.model.tensor_parallel import Shards
from spottrain.pipeline.model.tensor_ranks import Absent, TensorRanks
from spottrain.wire.model import GroupProfile, MicrobatchProfile, SectionProfile
from spottrain.wire.plan import Slot

BUDGET_S = 0.3
"""Of a micro-batch size, unless steady before."""
MAX_ROUND_S = 1.0
"""A micro-batch size of which one repetition takes a rank alone longer is not measured in groups:
times and bytes are scaled from the size before."""

_SCALED = [field.name for field in fields(SectionProfile) if field.name.endswith(("_s", "_bytes"))]
Groups = Mapping[tuple[int, ...], dist.ProcessGroup]


def groups_of(slots: Sequence[Slot], size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each group of ``size`` in the VM with the most slots.

    Args:
        slots: Of every rank; a slot's second process is in no group.
        size: Ranks that divide matrices.
    """
    vms: dict[str, list[int]] = {}
    for rank, slot in enumerate(slots):
        if slot not in slots[:rank]:
            vms.setdefault(slot.vm_id, []).append(rank)
    fullest = max(vms.values(), key=len)
    return tuple(
        tuple(fullest[first : first + size]) for first in range(0, len(fullest) - size + 1, size)
    )


def representatives(
    loaded: LoadedJob, sections: Iterable[SectionProfile], preferred: Iterable[int]
) -> dict[int, int]:
    """Return for each section the one that is measured for all that are like it.

    Sections are alike if their parameters have the same shapes, and they save and send as much.
    Of these the one of middling speed is taken.

    Args:
        loaded: The job.
        sections: All, as measured alone.
        preferred: Sections of which one is taken where there are some.
    """
    alike: dict[object, list[SectionProfile]] = {}
    for one in sections:
        shapes = tuple((s.shape, s.dtype, s.trainable) for s in loaded.specs[one.index])
        key = shapes, one.saved_bytes, one.output_bytes
        alike.setdefault(key, []).append(one)
    chosen: dict[int, int] = {}
    for some in alike.values():
        near = [one for one in some if one.index in preferred] or some
        middle = sorted(near, key=lambda one: one.forward_s + one.backward_s)[len(near) // 2]
        chosen |= {one.index: middle.index for one in some}
    return chosen


class _Ranks:
    """Those that a member computes with: its group, or nobody as long as it tries alone what they
    will do together. If one has no memory for that, the others must not wait for it."""

    def __init__(self, peers: TensorRanks) -> None:
        self.size, self.index = peers.size, peers.index
        self.go_on_with(peers)

    def go_on_with(self, peers: TensorRanks) -> None:
        """Have collectives be those of other ranks, as many, from now on."""
        self.sum, self.gather, self.sum_parts = peers.sum, peers.gather, peers.sum_parts


class _Member:
    """This rank as one of a group.

    Args:
        loaded: The job.
        sections: Those that the group measures.
        checkpoint: As for ``SectionBench``.
        device: What this rank computes on.
        group: The group.
    """

    def __init__(
        self,
        loaded: LoadedJob,
        sections: Sequence[int],
        checkpoint: str,
        device: Device,
        group: TensorGroup,
    ) -> None:
        self._device, self._layout = device, loaded.layout
        self._group, self._nobody = group, Absent(group.size, group.index)
        self._ranks = _Ranks(self._nobody)
        sequence = loaded.spec.sequence_parallel
        self._shards = shards = Shards.of(loaded.layout, self._ranks, sequence=sequence)
        self._make = partial(SectionBench, loaded, sections, checkpoint, device, shards=shards)
        self._bench: SectionBench | None = None

    def has_room(self, microbatch_size: int, inputs: Mapping[int, Activations]) -> bool:
        """Warm up alone; return whether there is memory for that."""
        self._ranks.go_on_with(self._nobody)
        try:
            bench = self._bench = self._bench or self._make()
            batch = bench.batch(microbatch_size)
            own = {section: self._part_of(section, given) for section, given in inputs.items()}
            bench.warm_up_each(batch, own)
            bench.run_once(batch)
        except torch.OutOfMemoryError:
            return False
        finally:
            forget(self._device)
        return True

    def _part_of(self, section: int, given: Activations) -> Activations:
        """Return what a rank of the group gets of what comes into a section."""
        if not self._shards.split.is_split_before(self._layout, section):
            return given
        return [part_of(given[0], self._ranks), *given[1:]]

    def measure(self, microbatch_size: int) -> list[dict[str, Any]]:
        """Measure with all others of the group; return the sections."""
        assert self._bench is not None
        self._ranks.go_on_with(self._group)
        measured = self._bench.measure(microbatch_size, BUDGET_S)
        forget(self._device)
        return list(map(asdict, measured.sections))


class GroupRound:
    """One rank's part in measuring groups; all ranks do the same steps in the same order.

    Args:
        loaded: The job.
        slots: Of every rank.
        shares: Sections that each rank measures alone.
        rank: This one.
        sizes: Numbers of ranks that divide matrices; those that no VM has slots for are left out.
        checkpoint: As for ``SectionBench``.
        device: What this rank computes on.
    """

    def __init__(
        self,
        loaded: LoadedJob,
        slots: Sequence[Slot],
        shares: Sequence[range],
        rank: int,
        sizes: Sequence[int],
        checkpoint: str,
        device: Device,
    ) -> None:
        self._loaded, self._checkpoint, self._device = loaded, checkpoint, device
        self._rank, self._shares = rank, shares
        found = {size: groups_of(slots, size) for size in sizes}
        self._groups = {size: groups for size, groups in found.items() if groups}
        self._chosen: dict[int, int] = {}
        self._inputs: dict[int, dict[int, Activations]] = {}
        """Of chosen sections of this rank, by the micro-batch sizes that are measured."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of groups that are measured."""
        return tuple(self._groups)

    @property
    def memberships(self) -> list[tuple[int, ...]]:
        """The ranks of every group."""
        return [ranks for groups in self._groups.values() for ranks in groups]

    def keep_inputs(self, microbatch: MicrobatchProfile, bench: SectionBench) -> None:
        """Keep what groups need of what this rank has just measured alone."""
        if not self._groups:
            return
        if not self._chosen:
            near = {k for ranks in self.memberships for rank in ranks for k in self._shares[rank]}
            self._chosen = representatives(self._loaded, microbatch.sections, near)
        if not self._inputs or self._round_s(microbatch) <= MAX_ROUND_S:
            self._inputs[microbatch.microbatch_size] = bench.inputs(self._chosen.values())

    def measure(
        self,
        size: int,
        alone: Sequence[MicrobatchProfile],
        on_host: Groups,
        on_device: Groups,
    ) -> GroupProfile:
        """Measure groups of a size.

        Args:
            size: One of ``sizes``.
            alone: What was measured before, each rank by itself.
            on_host: Gloo's groups of this rank, by their members.
            on_device: Those of the devices, where they have some.

        Raises:
            UserCodeError: The user's code raised.
            GenerationBrokenError, RuntimeError: Another rank is gone.
        """
        member = self._member_of(size, on_host, on_device)
        microbatches: list[MicrobatchProfile] = []
        measured, found = alone[0], dict[int, SectionProfile]()
        for one in alone:
            if one.microbatch_size in self._inputs:
                inputs = self._exchange_inputs(size, one.microbatch_size)
                if not all(gather(member is None or member.has_room(one.microbatch_size, inputs))):
                    break
                members = gather(None if member is None else member.measure(one.microbatch_size))
                measured, found = one, _medians([own for own in members if own is not None])
            sections = (self._like(section, found, measured.sections) for section in one.sections)
            microbatches.append(replace(one, sections=tuple(sections), overheads=None))
        return GroupProfile(size=size, microbatches=tuple(microbatches))

    def _round_s(self, alone: MicrobatchProfile) -> float:
        """Return how long one repetition of what groups measure takes a rank alone."""
        chosen = [one for one in alone.sections if self._chosen[one.index] == one.index]
        return sum(one.forward_s + one.recompute_s + one.backward_s for one in chosen)

    def _member_of(self, size: int, on_host: Groups, on_device: Groups) -> _Member | None:
        """Return this rank as one of a group, if it is in one."""
        ranks = next((ranks for ranks in self._groups[size] if self._rank in ranks), None)
        if ranks is None:
            return None
        group = TensorGroup(
            ranks, self._rank, self._device, on_host[ranks], on_device.get(ranks), Activity()
        )
        sections = sorted(set(self._chosen.values()))
        return _Member(self._loaded, sections, self._checkpoint, self._device, group)

    def _exchange_inputs(self, size: int, microbatch_size: int) -> dict[int, Activations]:
        """Have those that measured sections alone send what came into them to the ranks of all
        groups of a size; return what this one gets."""
        own, host = self._inputs[microbatch_size], HostDevice()
        received: dict[int, Activations] = {}
        for section in sorted(set(self._chosen.values())):
            owner = next(rank for rank, share in enumerate(self._shares) if section in share)
            for member in (rank for ranks in self._groups[size] for rank in ranks):
                if self._rank == owner == member:
                    received[section] = own[section]
                elif self._rank == owner:
                    with closing(PipelineLinks(None, member, host)) as links:
                        links.send(Direction.ACTIVATION, own[section])
                        links.flush()
                elif self._rank == member:
                    with closing(PipelineLinks(owner, None, host)) as links:
                        links.expect(Direction.ACTIVATION, 1)
                        arrival = links.arrival(wait=True)
                        assert arrival is not None
                        received[section] = arrival.activations_on(host)
        return received

    def _like(
        self,
        section: SectionProfile,
        found: Mapping[int, SectionProfile],
        alone: Sequence[SectionProfile],
    ) -> SectionProfile:
        """Return a section in a group, by the one that was measured for it.

        Args:
            section: As measured alone.
            found: What was measured in groups.
            alone: The same sections, and all others, at the same micro-batch size alone.
        """
        chosen = self._chosen[section.index]
        measured, before = found[chosen], alone[chosen]
        scaled = {name: _scaled(name, section, measured, before) for name in _SCALED}
        # Optimizers update whole parameters.
        scaled["update_bytes"] = section.update_bytes
        return replace(measured, index=section.index, **scaled)


def _scaled(
    name: str, section: SectionProfile, measured: SectionProfile, before: SectionProfile
) -> Any:
    """Return a time or bytes of a section as they change from ``before`` to ``measured``."""
    own, after, whole = (getattr(one, name) for one in (section, measured, before))
    return type(own)(own * after / whole) if whole else after


def _medians(rows: Sequence[Sequence[dict[str, Any]]]) -> dict[int, SectionProfile]:
    """Return the medians of what the ranks of all groups have measured of the same sections."""
    found = {}
    for every in zip(*rows, strict=True):
        columns = {name: [one[name] for one in every] for name in every[0]}
        medians = {
            name: statistics.median_high(values)
            if isinstance(values[0], int)
            else statistics.median(values)
            for name, values in columns.items()
        }
        found[medians["index"]] = SectionProfile(**medians)
    return found
