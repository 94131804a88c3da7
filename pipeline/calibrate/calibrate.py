"""Measures a profile for planning, on all participants together (Varuna, section 4.3).

Every computing rank measures its share of the sections at the same time as the others;
then messages are timed between pairs of ranks, and all-reduces over rings. Nothing of
it depends on how a job will be planned: see ``docs/calibration.md``.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from spottrain import machine
from spottrain.errors import SpottrainError, UserCodeError
from spottrain.morphing.plan import profiles
from spottrain.morphing.simulate.reducing import NCCL_FAILED
from spottrain.pipeline.calibrate import tasks
from spottrain.pipeline.calibrate.groups import GroupRound, Groups
from spottrain.pipeline.calibrate.links import (
    MessageTimes,
    Rings,
    gather,
    measure_rings,
    memberships_of,
    message_sizes,
    rings_to_measure,
    time_messages,
)
from spottrain.pipeline.calibrate.sections import SectionBench, forget
from spottrain.pipeline.comm.device_group import NetworkRefusedError, TrialGroups
from spottrain.pipeline.comm.groups import (
    TIMEOUT_S,
    GenerationBrokenError,
    connect_rendezvous,
    is_joined,
    join,
    leave,
    new_groups,
    release_rendezvous,
    world,
)
from spottrain.pipeline.comm.p2p import Direction, LinkOf, PipelineLinks, through_hosts
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.units import counted
from spottrain.wire import messages
from spottrain.wire.messages import Calibrate
from spottrain.wire.model import (
    GroupProfile,
    LinkProfile,
    MicrobatchProfile,
    Profile,
    RingProfile,
    SectionProfile,
    TaskOverheads,
)
from spottrain.wire.plan import Slot

SECTIONS_BUDGET_S = 1.5
MIN_SECTIONS_BUDGET_S = 0.7
"""For the sections at all micro-batch sizes, unless steady before; the minimum for
one."""
LINK_BUDGET_S = 0.6
RINGS_BUDGET_S = 0.6
"""For all-reduces in the VMs' memory, and again for those on GPUs."""
_NO_ROOM = 1
"""Comes with no activation from a rank that has no memory for a size, or heard so."""
_GROUP_TIMEOUT_S = 300.0
_USER_CODE_FAILED = "user code failed"
"""Key in the round's store."""
MAX_ROUND_S = 5.0
"""A micro-batch size is left out if one repetition would take longer."""
LOOPBACK = LinkProfile(latency_s=3e-4, bandwidth_bytes_per_s=1e9)
"""Assumed for the links where a single process measures: it has no peer."""
_RING_BYTES = range(1 << 14, 1 << 25)
"""Tensors of all-reduces are about as large as a section, but within this range."""

_OPEN_SIZE = 16
"""Up to where a job that leaves the micro-batch size open has sizes measured; larger ones are
tried as long as"""
_PAYS = 0.1
"""of an example's time is saved by each."""

Report = Callable[[messages.CalibrationProgress | messages.SectionPrepared], None]


class NoRoomError(SpottrainError):
    """A device has no memory for the smallest thing that is to be measured."""


def calibrate(
    loaded: LoadedJob,
    command: Calibrate,
    rank: int,
    report: Report,
    device: Device,
    device_name: str,
    failed: Callable[[UserCodeError], None] = lambda error: None,
) -> Profile | None:
    """Take part in a round of measuring.

    Args:
        loaded: The job.
        command: The participants, and what is to be measured.
        rank: Which of the participants this process is.
        report: Called with the progress of the round, at rank 0.
        device: What this process computes on.
        device_name: As the profile names it.
        failed: Called when the user's code raised, before other participants see
            connections break.

    Returns:
        The profile, at rank 0; ``None`` also where the user's code has failed at another
        participant, which tells what there is to tell.

    Raises:
        UserCodeError: The user's code raised.
        UnreadableCheckpointError: The checkpoint cannot be read.
        NetworkRefusedError: The job file asks for NCCL, which cannot start.
        NoRoomError: A device has no memory for a single section.
        GenerationBrokenError, RuntimeError: Another participant is gone.
    """
    if len(command.participants) < 2:
        with device.using():
            return _Round(loaded, command, 0, report, device, device_name).run()
    store = connect_rendezvous(command.store_host, command.store_port, TIMEOUT_S)
    size = len(command.participants)
    connections = join(store, "calibration", rank, size, TIMEOUT_S)
    measuring: _Round | None = None
    try:
        with device.using():
            measuring = _Round(loaded, command, rank, report, device, device_name)
            profile = measuring.run()
            release_rendezvous(store, size)
            return profile
    except BaseException as error:
        if isinstance(error, UserCodeError):
            failed(error)
            store.add(_USER_CODE_FAILED, 1)  # answered: others see it before the cut
        is_broken = isinstance(error, RuntimeError | GenerationBrokenError)
        follows = is_broken and _user_code_failed(store)
        connections.cut()
        if not follows:
            raise
        return None
    finally:
        if measuring is not None:
            measuring.close()
        if measuring is None or measuring.is_free:
            leave()  # else it would wait, too; the process ends now


def _user_code_failed(store: Store) -> bool:
    """Return whether another participant has failed because of the user's code.

    What breaks here is then only what follows from that.
    """
    try:
        return bool(store.check([_USER_CODE_FAILED]))
    except RuntimeError:  # the store is gone as well
        return False


def section_shares(slots: Sequence[Slot], num_sections: int) -> list[range]:
    """Return the sections that each rank measures: even runs, none for a slot's second
    process."""
    shares = iter(even_shares(num_sections, len(set(slots))))
    return [range(0) if slot in slots[:rank] else next(shares) for rank, slot in enumerate(slots)]


def even_shares(num_sections: int, count: int) -> list[range]:
    """Divide sections into ``count`` runs that are as even as possible."""
    return [
        range(num_sections * rank // count, num_sections * (rank + 1) // count)
        for rank in range(count)
    ]


_Timed = tuple[LinkProfile, float]
"""A link between two ranks, and how long its sender is busy with a message."""


@dataclass(frozen=True, slots=True)
class _Formed:
    """Groups of ranks that sum together."""

    rings: Sequence[Rings]
    """Those to be measured."""
    on_host: Groups
    on_device: Groups = field(default_factory=dict)
    link: LinkOf = through_hosts
    """What carries messages from device to device, if anything does."""
    failure: str = ""
    """Why there are none on devices, where NCCL was tried."""


@dataclass(frozen=True, slots=True)
class _Links:
    """Measurements of messages and all-reduces."""

    within_vm: LinkProfile
    between_vms: LinkProfile
    rings: tuple[RingProfile, ...]
    posting_s: float
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceCosts:
    """Measurements of updates and transfers; see ``Profile``."""

    optimizer_s_per_byte: float
    host_optimizer_s_per_byte: float
    upload_bytes_per_s: float
    download_bytes_per_s: float
    quantise_s_per_byte: float
    context_bytes: int


class _Round:
    """One rank's part of one round; all ranks do the same steps in the same order."""

    def __init__(
        self,
        loaded: LoadedJob,
        command: Calibrate,
        rank: int,
        report: Report,
        device: Device,
        device_name: str,
    ) -> None:
        self._loaded, self._command, self._rank = loaded, command, rank
        self._report, self._device = report, device
        self._device_name = device_name
        self._slots = command.participants or (Slot(vm_id="", index=0),)
        self._vms = [slot.vm_id for slot in self._slots]
        shares = section_shares(self._slots, loaded.layout.num_sections)
        self._computing = [r for r, share in enumerate(shares) if share]
        self._sizes = command.microbatch_sizes or (loaded.spec.microbatch_size,)
        read = command.checkpoint
        try:
            self._bench = SectionBench(loaded, shares[rank], read, device, self._prepared)
        except torch.OutOfMemoryError as error:
            raise self._no_room("no example") from error
        self._groups = GroupRound(
            loaded, self._slots, shares, rank, command.tensor_sizes, read, device
        )
        self._links: PipelineLinks | None = None
        """The open links."""
        self.is_free = True
        """False if something is under way on the device that could not be ended."""
        self._done = 0

    def _no_room(self, examples: str) -> NoRoomError:
        return NoRoomError(
            f"{self._device_name} has no memory for one section with a micro-batch of {examples}: "
            "take a smaller microbatch_size, cut the model into more sections, or rent larger "
            "devices"
        )

    def _prepared(self, section: int) -> None:
        number = self._command.generation
        self._report(messages.SectionPrepared(generation=number, section=section))

    def run(self) -> Profile | None:
        """Measure everything; return the profile at rank 0."""
        if is_joined():
            world().barrier()  # some read more of the model than others
        microbatches = self._measure_sizes()
        is_whole = {one.microbatch_size for one in microbatches} >= set(self._sizes)
        ended = () if is_whole else (profiles.SIZES_ENDED,)
        with self._forming() as formed:
            links = self._measure_links(microbatches[-1], formed)
            self._progress("links and all-reduces")
            groups = tuple(self._measure_groups(microbatches, formed))
        costs = self._measure_device()
        self._progress("optimizer")
        microbatches = _with_posting(microbatches, links.posting_s)
        if self._rank:
            return None
        spec = self._loaded.spec
        return Profile(
            fingerprint=self._loaded.fingerprint,
            device=self._device_name,
            software=machine.software(),
            microbatches=tuple(microbatches),
            **asdict(costs),
            within_vm=links.within_vm,
            between_vms=links.between_vms,
            rings=links.rings,
            groups=groups,
            task_overhead_s=_mean_s(microbatches),
            loader=spec.loader,
            precision=spec.precision,
            selective_recompute=spec.selective_recompute,
            sequence_parallel=spec.sequence_parallel,
            sources=links.assumed + ended,
        )

    def close(self) -> None:
        """End the threads; after an error the connections must have been cut."""
        if self._links is not None:
            self._links.close()
            self._links = None

    def _progress(self, what: str) -> None:
        """Report a step that all ranks have done."""
        self._done += 1
        if self._rank == 0:
            self._report(
                messages.CalibrationProgress(
                    generation=self._command.generation,
                    done=self._done,
                    total=max(self._done, len(self._sizes) + 2 + len(self._groups.sizes)),
                    what=what,
                )
            )

    # --- sections -----------------------------------------------------------------------

    def _measure_sizes(self) -> list[MicrobatchProfile]:
        """Measure one micro-batch size after the other, as time and memory permit.

        Raises:
            NoRoomError: There is no memory for the smallest one.
        """
        microbatches: list[MicrobatchProfile] = []
        times_s: list[float] = []
        """Of an example, at each size."""
        sizes = deque(self._sizes)
        while sizes:
            size = sizes.popleft()
            every: list[dict[str, Any] | None] = gather(self._measure_sections(size))
            forget(self._device)
            found = [one for one in every if one is not None]
            if len(found) < len(every):
                break
            sections = [SectionProfile(**s) for one in found for s in one["sections"]]
            microbatches.append(
                MicrobatchProfile(
                    microbatch_size=size,
                    sections=tuple(sections),
                    overheads=self._measure_tasks(size, found),
                )
            )
            self._groups.keep_inputs(microbatches[-1], self._bench)
            self._progress(f"sections with {counted(size, 'example')}")
            times_s.append(sum(one["round_s"] for one in found) / size)
            if not sizes and self._pays_to_grow(size, times_s):
                sizes.append(2 * size)
            if sizes and not self._may_grow(sizes[0] / size, found):
                break
        if not microbatches:
            raise self._no_room(counted(self._sizes[0], "example"))
        return microbatches

    def _pays_to_grow(self, size: int, times_s: Sequence[float]) -> bool:
        """Return whether a job that leaves the size open would gain by twice the largest."""
        is_open = size >= _OPEN_SIZE and len(times_s) > 1
        divides = self._loaded.spec.minibatch_size % (2 * size) == 0
        return is_open and divides and times_s[-1] < (1 - _PAYS) * times_s[-2]

    def _measure_sections(self, size: int) -> dict[str, Any] | None:
        """Pass real activations through all ranks, then measure all shares at once.

        Returns:
            ``None``: a device has no memory for that.
        """
        fits = self._rank not in self._computing or self._relay(size)
        if not all(gather(fits)):
            return None
        share_s = SECTIONS_BUDGET_S / len(self._sizes)
        budget_s = max(MIN_SECTIONS_BUDGET_S, share_s)
        try:
            measured = self._bench.measure(size, budget_s)
        except torch.OutOfMemoryError:
            return None
        return {**asdict(measured), "training_bytes": self._bench.training_bytes}

    def _relay(self, size: int) -> bool:
        """Warm up; return whether this rank and those before it have memory for that."""
        batch, place = self._bench.batch(size), self._computing.index(self._rank)
        before = self._computing[place - 1] if place else None
        last = place + 1 == len(self._computing)
        after = None if last else self._computing[place + 1]
        self._links = links = PipelineLinks(before, after, self._device)
        fits, activations = True, []
        if before is not None:
            links.expect(Direction.ACTIVATION, 1)
            arrival = links.arrival(wait=True)
            assert arrival is not None
            fits = arrival.note != _NO_ROOM
            activations = arrival.activations_on(self._device)
        try:
            if fits:
                activations = self._bench.warm_up(batch, activations)
        except torch.OutOfMemoryError:
            fits = False
        if after is not None:
            links.send(Direction.ACTIVATION, activations if fits else [], 0 if fits else _NO_ROOM)
            links.flush()
        self.close()
        return fits

    def _measure_tasks(self, size: int, every: Sequence[dict[str, Any]]) -> TaskOverheads | None:
        """Let the executor run over all shares; ``None``: it would take too much."""
        slowest_s = max(one["round_s"] for one in every)
        count = tasks.microbatches_for(len(self._computing), slowest_s)
        needed = [
            one["training_bytes"]
            + sum(s["saved_bytes"] for s in one["sections"])
            + count * sum(s["output_bytes"] for s in one["sections"][-1:])
            + max((_spike_bytes(s) for s in one["sections"]), default=0)
            for one in every
        ]
        if not count or max(needed) > self._room_bytes():
            return None
        samples: tasks.Samples = {}
        if self._rank in self._computing:
            place = self._computing.index(self._rank)
            chain = tasks.Chain(tuple(self._computing), place)
            self._links = links = tasks.TimedLinks(*chain.neighbours, self._device)
            samples = self._time_tasks(chain, links, size, count)
            self.close()
            forget(self._device)
        own_s = (every[rank]["reaching_s"] for rank in self._computing)
        reaching_s = statistics.median(own_s)
        spec = self._loaded.spec
        microbatches = spec.minibatch_size // size
        return tasks.summarise_overheads(gather(samples), reaching_s, spec.loader, microbatches)

    def _time_tasks(
        self, chain: tasks.Chain, links: tasks.TimedLinks, size: int, count: int
    ) -> tasks.Samples:
        """Let the executor run over this rank's share; empty: alone, it has no memory for that."""
        bench = self._bench
        try:
            with bench.training() as memory:
                return tasks.time_tasks(self._loaded, bench, memory, chain, links, size, count)
        except torch.OutOfMemoryError:
            if len(chain.ranks) > 1:  # neighbours wait
                raise
            return {}

    def _may_grow(self, factor: float, every: Sequence[dict[str, Any]]) -> bool:
        """Return whether a size larger by ``factor`` may be measured too, as all ranks do."""
        slowest_s = max(one["round_s"] for one in every)
        saved = [s["saved_bytes"] for one in every for s in one["sections"]]
        room = self._room_bytes()
        return bool(slowest_s * factor < MAX_ROUND_S and max(saved, default=0) * factor < room)

    def _room_bytes(self) -> float:
        """Return the bytes that each rank may use for tensors, equal at all ranks."""
        own = self._device.memory_bytes()
        if own is None:
            own = machine.available_bytes() // len(self._slots)
        least: int = min(gather(own))
        return least / 2

    # --- updates, and the way between host and device ----------------------------------

    def _measure_device(self) -> _DeviceCosts:
        bench = self._bench
        quantise = _per_byte(gather(bench.quantise_s()))
        on_host = _per_byte(gather(bench.update_s("host")))
        upload = download = 0.0
        on_device, context_bytes = 0.0, 0
        if not self._device.is_host:
            upload, download = map(min, zip(*gather(bench.transfer_bytes_per_s()), strict=True))
            on_device = _per_byte(gather(bench.update_s("device")))
            context_bytes = max(gather(self._device.context_bytes()))
        return _DeviceCosts(
            # Where the device has no memory for one section's update, no plan has it there.
            optimizer_s_per_byte=on_device or on_host,
            host_optimizer_s_per_byte=0.0 if self._device.is_host else on_host,
            upload_bytes_per_s=upload,
            download_bytes_per_s=download,
            quantise_s_per_byte=quantise,
            context_bytes=context_bytes,
        )

    # --- links --------------------------------------------------------------------------

    @contextmanager
    def _forming(self) -> Iterator[_Formed]:
        """Form groups of ranks that sum together in their VMs' memory and, where possible, on
        GPUs, which have links then, too.

        Raises:
            NetworkRefusedError: The job file asks for NCCL, which does not start.
        """
        if not is_joined():
            yield _Formed((), {})
            return
        vms = self._vms
        plans = rings_to_measure(vms)
        memberships = list(dict.fromkeys((*memberships_of(plans), *self._groups.memberships)))
        on_host = new_groups(memberships, _GROUP_TIMEOUT_S)
        network = self._loaded.spec.network
        if network == "gloo":
            yield _Formed(plans, on_host)
            return
        trial = TrialGroups(self._device)
        links = [way for pair in pairs_within_vms(vms) for way in (pair, pair[::-1])]
        try:
            is_there = trial.form(memberships, self._rank, _GROUP_TIMEOUT_S, links)
            if trial.failure and network == "nccl":
                raise NetworkRefusedError(
                    f"runtime.network: nccl does not start: {trial.failure}; use auto or gloo"
                )
            if is_there:
                yield _Formed(plans, on_host, trial.groups, trial.link)
            else:
                yield _Formed(plans, on_host, failure=trial.failure)
        finally:
            self.is_free = trial.close()

    def _measure_groups(
        self, microbatches: Sequence[MicrobatchProfile], formed: _Formed
    ) -> Iterator[GroupProfile]:
        for size in self._groups.sizes:
            yield self._groups.measure(size, microbatches, formed.on_host, formed.on_device)
            self._progress(f"sections that {size} slots divide")

    def _measure_links(self, largest: MicrobatchProfile, formed: _Formed) -> _Links:
        if not is_joined():
            return _Links(LOOPBACK, LOOPBACK, (), 0.0, (profiles.LINKS_ASSUMED,))
        activation_bytes = max(one.output_bytes for one in largest.sections)
        inside = pairs_within_vms(self._vms)
        within = self._time_pairs(inside, activation_bytes)
        between = self._time_pairs(pairs_between_vms(self._vms), activation_bytes)
        rings = self._measure_rings(formed)
        unmeasured = [f"{NCCL_FAILED}{formed.failure}"] if formed.failure else []
        if formed.link is not through_hosts:
            straight = self._time_pairs(inside, activation_bytes, formed.link)
            if (
                within
                and straight
                and _message_s(straight, activation_bytes) < _message_s(within, activation_bytes)
            ):
                within = straight
        known = within or between
        assert known is not None
        if between is None:
            unmeasured.append(profiles.BETWEEN_AS_WITHIN)
        elif within is None:
            unmeasured.append(profiles.WITHIN_AS_BETWEEN)
        within_vm, _ = within or known
        between_vms, posting_s = between or known
        return _Links(within_vm, between_vms, rings, posting_s, tuple(unmeasured))

    def _measure_rings(self, formed: _Formed) -> tuple[RingProfile, ...]:
        """Measure all-reduces of tensors about as large as a section."""
        layout = self._loaded.layout
        count = layout.num_sections
        mean = sum(layout.param_bytes(k) for k in range(count)) // count
        tensor = min(max(mean, _RING_BYTES.start), _RING_BYTES.stop)
        sizes = (1 << 12, tensor // 4, tensor)
        rings = measure_rings(formed.rings, formed.on_host, sizes, HostDevice(), RINGS_BUDGET_S)
        if formed.link is through_hosts:
            return rings
        return rings + measure_rings(
            formed.rings, formed.on_device, sizes, self._device, RINGS_BUDGET_S
        )

    def _time_pairs(
        self,
        pairs: Sequence[tuple[int, int]],
        activation_bytes: int,
        link_of: LinkOf = through_hosts,
    ) -> _Timed | None:
        """Time all pairs at once; return the median link and the time to post."""
        mine = next((pair for pair in pairs if self._rank in pair), None)
        times: MessageTimes | None = None
        gather(None)
        if mine is not None:
            first, second = mine
            leads = self._rank == first
            times = time_messages(
                second if leads else first,
                leads=leads,
                sizes=message_sizes(activation_bytes),
                device=self._device,
                link_of=link_of,
                budget_s=LINK_BUDGET_S,
            )
        found = None
        if times is not None:
            posted_s = times.posting_near_s(activation_bytes)
            found = (asdict(times.profile()), posted_s)
        every = [one for one in gather(found) if one is not None]
        if not every:
            return None
        names = every[0][0].keys() - {"on_devices"}
        link = {k: statistics.median(one[k] for one, _ in every) for k in names}
        profile = LinkProfile(**link, on_devices=link_of is not through_hosts)
        return profile, statistics.median(posted for _, posted in every)


def _message_s(timed: _Timed, num_bytes: int) -> float:
    """Return how long a message takes."""
    link, _ = timed
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s


def _spike_bytes(section: dict[str, Any]) -> int:
    """Return the bytes that a section takes at most beside what it keeps."""
    found: int = max(section[f"{task}_bytes"] for task in ("forward", "recompute", "backward"))
    return found


def _per_byte(measured: Iterable[tuple[float, int]]) -> float:
    """Return seconds per byte, over what all ranks have measured of both."""
    seconds, num_bytes = map(sum, zip(*measured, strict=True))
    return seconds / num_bytes if num_bytes else 0.0


def _with_posting(
    microbatches: Sequence[MicrobatchProfile], posting_s: float
) -> list[MicrobatchProfile]:
    """Return profiles with the cost of posting, also if no stage has sent."""
    return [
        replace(one, overheads=replace(one.overheads, posting_s=posting_s))
        if one.overheads is not None and not one.overheads.posting_s
        else one
        for one in microbatches
    ]


def _mean_s(microbatches: Sequence[MicrobatchProfile]) -> float:
    """Return the mean overhead of a task."""
    known = [one.overheads for one in microbatches if one.overheads is not None]
    return (
        statistics.fmean(
            time_s for o in known for time_s in (o.forward_s, o.recompute_s, o.backward_s)
        )
        if known
        else 0.0
    )


def pairs_within_vms(vms: Sequence[str]) -> list[tuple[int, int]]:
    """Return two ranks of every VM that has two."""
    ranks = _ranks_of(vms)
    return [(some[0], some[1]) for some in ranks if len(some) > 1]


def pairs_between_vms(vms: Sequence[str]) -> list[tuple[int, int]]:
    """Return a rank each of as many pairs of VMs as there are, no VM in two of them."""
    firsts = [some[0] for some in _ranks_of(vms)]
    return list(zip(firsts[::2], firsts[1::2], strict=False))


def _ranks_of(vms: Sequence[str]) -> list[list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, vm in enumerate(vms):
        ranks.setdefault(vm, []).append(rank)
    return list(ranks.values())
