"""State, events and commands of the pool's core."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Literal

from spottrain.eventlog.changed import replace
from spottrain.units import HOUR_S

Vms = tuple[int, ...]
"""VMs by supply, in the pool's order."""
Throughputs = tuple[tuple[tuple[int, float], ...], ...]
"""By supply: (VMs, examples per second) at the job's constant mini-batch; empty where the job
cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """One kind of VM at one place, and how many of it the pool may hold."""

    name: str
    """Kind and place, such as ``a100-8@gcp/us-east1-b``."""
    vms: int
    microusd_per_hour: int
    """Of one VM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Caps of the pool or of a team; infinite for none."""

    max_vms: float = math.inf
    max_microusd: float = math.inf
    max_microusd_per_hour: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A team's part and its own caps."""

    weight: float = 1.0
    order: Literal["fair", "fifo"] = "fair"
    """How its part is divided among its jobs."""
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What a person set."""

    policy: str = "fair"
    limits: Limits = Limits()
    budget_per: Literal["life", "month"] = "life"
    """What the pool's and the teams' dollars are for: everything, or each calendar month in
    UTC. A job's own are always for its life. Points in time are then since the Unix epoch."""
    teams: Mapping[str, Team] = field(default_factory=dict)
    """By name. A job of no team, or of one that is not named, has weight 1 and no caps."""
    grant_s: float = HOUR_S
    """How long VMs and dollars are granted for; renewed when a quarter is left."""
    min_stay_s: float = 60.0
    """Time between two changes of sizes that are only for more throughput."""
    round_s: float = 360.0
    """How long a job keeps VMs that others, also below their smallest size, wait for."""
    silent_s: float = 300.0
    """A manager that has not reported for so long counts as dead: it is granted nothing."""
    shortest_grant_s: float = 60.0
    """Money for less than this starts nothing."""
    reservation_s: float = 15.0
    """How long a job keeps a VM that it would return, if others have use for it; 0: never."""
    take_s: float = 90.0
    """How long a job may ask for a VM that another one keeps, which keeps it for as long: the
    manager of one that waited starts only then. With ``reservation_s`` less than an ending job
    may take for its last checkpoint (``LAST_CHECKPOINT_S``), so that its budget holds."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What is submitted."""

    name: str
    throughputs: Throughputs
    examples: float
    team: str = ""
    weight: float = 1.0
    """Its priority, under the policy of that name."""
    deadline_s: float = math.inf
    """Point in time."""
    limits: Limits = Limits()
    morph_s: float = 10.0
    """What a change of size costs it, in seconds without training."""
    machine: str = ""
    """What its VMs are: owner, image, role, setup and network. A VM goes from one job to
    another without a boot only where this is the same; empty: never."""
    uid: str = ""
    """Of the job on disk: another one may have its name later."""

    @cached_property
    def best(self) -> float:
        """Its highest throughput, examples per second."""
        return max(rate for table in self.throughputs for _, rate in table)

    @cached_property
    def smallest(self) -> float:
        """What it trains at its smallest size, examples per second."""
        return min(table[0][1] for table in self.throughputs if table)

    @cached_property
    def of_a_vm(self) -> float:
        """The most that it trains on each VM of a smallest size, examples per second."""
        return max(table[0][1] / table[0][0] for table in self.throughputs if table)

    @cached_property
    def envelopes(self) -> tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]:
        """By supply: sizes, and the most that it trains on so many VMs or fewer."""
        return tuple(
            (
                tuple(n for n, _ in table),
                tuple(accumulate((rate for _, rate in table), max)),
            )
            for table in self.throughputs
        )


RECEIVE_S = 30.0
"""How long after its time an order that was met in time may still bring a VM, as clouds
promise (``CloudProvider.take``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedVm:
    """A VM that a job keeps for another one: nothing of the job is left on it. It is billed
    to the job, which can only return it, or lose it to a job that is granted it."""

    vm_id: str
    supply: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One VM that one job keeps may become another's, until a time.

    Once the other has asked for it, or might have, the order is open until its journal says
    what came of it. So at most one job may take a VM.
    """

    serial: int
    """Of the first grant with it."""
    vm_id: str
    supply: int
    by: str
    """The job that keeps it."""
    until_s: float
    """The cloud gives the VM to nobody who asks later."""

    @property
    def name(self) -> str:
        """Unique for the job that gets the VM."""
        return f"{self.serial}-{self.vm_id}"


class PoolJobPhase(Enum):
    """Whether a job takes part."""

    ACTIVE = "active"
    PAUSED = "paused"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class PoolJob:
    """A job of the pool."""

    request: JobRequest
    arrived_s: float
    phase: PoolJobPhase = PoolJobPhase.ACTIVE
    examples_done: float = 0.0
    heard_s: float
    """When its manager last reported; when it was started, before."""
    target: Vms
    """What the last decision gives it."""
    target_rate: float = 0.0
    """What the policy gives it on average, examples per second."""
    granted: Vms
    """What its manager has been told to hold at most."""
    until_s: float = 0.0
    """When the grant ends; the manager returns its VMs by then."""
    serial: int = 0
    """Of the last grant."""
    held_upper_bound: Vms
    """The most that it may hold, by any grant that its manager may still follow."""
    held: Vms
    """As last reported."""
    kept: tuple[ReservedVm, ...] = ()
    """VMs of these that it keeps for others."""
    gone: frozenset[str] = frozenset()
    """VMs that others say they have, which it named when it last reported."""
    orders: tuple[Order, ...] = ()
    """VMs that it may take from others, until it says what came of that. They are part of
    ``granted``, and beside ``held_upper_bound``: nothing else is rented in their place."""
    refused: frozenset[str] = frozenset()
    """VMs that it asked for in vain."""
    reservation_s: float = 0.0
    """As last told: how long it keeps what it would return."""
    idle_s: float = 0.0
    """As last told: how long it may train nothing, as it moves elsewhere."""
    is_ending: bool = False
    """Whether it has reported that it is done, and returns its VMs."""
    until_upper_bound_s: float = 0.0
    """When the last of these grants ends."""
    spend_upper_bound: int = 0
    """Micro-dollars over its life, by any grant that its manager may still follow."""
    allowance: int = 0
    """Micro-dollars over its life, by the last grant."""
    spent: int = 0
    """Micro-dollars, as last reported."""
    spent_before: int = 0
    """Of these, what does not count against this month's budget."""
    entitled_s: float = 0.0
    """What the policy has given it so far, in seconds at its best throughput."""
    received_s: float = 0.0
    """What it was granted so far, in seconds at its best throughput."""
    resized_s: float = -math.inf
    began_s: float = -math.inf
    """When it was last granted more while it had none, or was short of its share."""
    short_since_s: float = math.inf
    """Since when it has been short of its share; infinite if it is not."""
    resumed_s: float = -math.inf
    """When a person last let it go on: how it had ended before does not count."""

    @property
    def runs(self) -> bool:
        """Whether it holds VMs, may, or has yet to learn that it does not."""
        holds = any(self.held_upper_bound) or any(self.held)
        return holds or bool(self.orders) or bool(self.gone)

    @property
    def committed(self) -> int:
        """Micro-dollars that are spent or may be."""
        return max(self.spent, self.spend_upper_bound)

    @property
    def committed_now(self) -> int:
        """Micro-dollars that count against the present budget of pool and team."""
        return self.committed - self.spent_before

    def rate(self, vms: Vms) -> float:
        """Return what it trains on VMs of one supply, 0 below its smallest size there.

        VMs of several supplies count by the best of them: its manager leaves the others.
        """
        best = 0.0
        for (sizes, rates), n in zip(self.request.envelopes, vms, strict=True):
            if n and (fitting := bisect_right(sizes, n)):
                best = max(best, rates[fitting - 1])
        return best

    @property
    def smallest(self) -> float:
        """What it trains at its smallest size, examples per second."""
        return self.request.smallest

    @property
    def is_short(self) -> bool:
        """Whether it had less than its share so far, and is granted less by more than a VM."""
        if self.received_s >= self.entitled_s:
            return False
        return self.rate(self.granted) < self.target_rate - self.request.of_a_vm

    @property
    def is_time_sliced(self) -> bool:
        """Whether its share is less than its smallest size: it has that now and then."""
        return self.target_rate < self.smallest

    def deficit_due_in_s(self, round_s: float) -> float:
        """Return after what time without VMs its share has come to a round of its smallest
        size; 0 or less if it has, infinite if it takes no turns.
        """
        if not self.is_time_sliced or not self.target_rate:
            return math.inf
        turn_s = round_s * self.smallest / self.best
        return (turn_s + self.received_s - self.entitled_s) * self.best / self.target_rate

    @property
    def best(self) -> float:
        """Its highest throughput, examples per second."""
        return self.request.best


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """All that the pool knows."""

    settings: PoolSettings = PoolSettings()
    supplies: tuple[Supply, ...] = ()
    jobs: Mapping[str, PoolJob] = field(default_factory=dict)
    now_s: float = 0.0
    decided_s: float = -math.inf
    """When targets last changed."""
    considered_s: float = -math.inf
    """When shares were last computed."""
    timer_s: float = math.inf
    """When the core is to be woken."""
    is_closed: bool = False

    def new_job(self, request: JobRequest) -> PoolJob:
        """Return a job that arrives now."""
        none = (0,) * len(self.supplies)
        return PoolJob(
            request=request,
            arrived_s=self.now_s,
            heard_s=self.now_s,
            target=none,
            granted=none,
            held_upper_bound=none,
            held=none,
        )

    def with_job(self, job: PoolJob) -> PoolState:
        """Return the state with a job in place of the one of its name."""
        return replace(self, jobs={**self.jobs, job.request.name: job})

    def team(self, job: PoolJob) -> Team:
        """Return a job's team."""
        return self.settings.teams.get(job.request.team, Team())

    def is_silent(self, job: PoolJob) -> bool:
        """Return whether a job's manager counts as dead."""
        return self.now_s - job.heard_s > self.settings.silent_s and job.runs

    def takes_part(self, job: PoolJob) -> bool:
        """Return whether a job is to have VMs."""
        is_active = job.phase is PoolJobPhase.ACTIVE and not self.is_closed
        return is_active and not job.is_ending and not self.is_silent(job)

    def microusd_per_hour(self, vms: Vms) -> int:
        """Return the price of VMs now."""
        pairs = zip(self.supplies, vms, strict=True)
        return sum(supply.microusd_per_hour * n for supply, n in pairs)


# --- Events: facts ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """A fact, and when it became known."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCreated(PoolEvent):
    """A person wants this pool; always the first event of a journal."""

    settings: PoolSettings
    supplies: tuple[Supply, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStarted(PoolEvent):
    """The pool's process has started; grants are given again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTimerFired(PoolEvent):
    """The time that was asked for has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequested(PoolEvent):
    """A person submitted a job."""

    request: JobRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingsReported(PoolEvent):
    """A job's manager says what it holds and has spent."""

    job: str
    serial: int
    """Of the grant that it follows."""
    held: Vms
    """What it holds or has asked a cloud for."""
    spent: int
    """Micro-dollars over its life."""
    examples_done: float
    throughputs: Throughputs | None = None
    """As corrected by measurements; None while they are the same."""
    kept: tuple[ReservedVm, ...] = ()
    """Part of ``held``: what it keeps for others."""
    taken: frozenset[str] = frozenset()
    """Orders of its grant by which it got a VM; the VM may have ended since."""
    open: frozenset[str] = frozenset()
    """Orders of its grant that it may still take, or may have taken. The others of the grant
    have come to nothing."""
    is_ending: bool = False
    """Whether it is done, and returns its VMs."""
    idle_asked_s: float = 0.0
    """For how long it asks to train nothing, as it is to move elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingsListed(PoolEvent):
    """The clouds say what a job holds whose manager is dead, after its VMs were returned."""

    job: str
    held: Vms
    spent: int
    """Micro-dollars over its life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJobEnded(PoolEvent):
    """A job's manager says that it has ended."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJobPaused(PoolEvent):
    """A person paused a job, or lets one go on that was paused or has ended."""

    job: str
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityChanged(PoolEvent):
    """A person changed a job's weight."""

    job: str
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SuppliesChanged(PoolEvent):
    """Prices or quotas are different; the names and their order stay."""

    supplies: tuple[Supply, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettingsChanged(PoolEvent):
    """A person changed weights, caps or the policy."""

    settings: PoolSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolClosed(PoolEvent):
    """A person takes the pool down: every job is to checkpoint and return its VMs."""


POOL_EVENTS = {cls.__name__: cls for cls in PoolEvent.__subclasses__()}
"""Classes of events by name."""


# --- Commands: requests -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Tell a job's manager what it may hold and spend; start one where none runs."""

    job: str
    serial: int
    vms: Vms
    until_s: float
    allowance: int
    """Micro-dollars over the job's life."""
    orders: tuple[Order, ...] = ()
    """Part of ``vms``: not rented, but taken from others."""
    reservation_s: float = 0.0
    """How long VMs that it returns are kept for others."""
    idle_s: float = 0.0
    """How long it may train nothing, to move elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnVms:
    """Return what a job holds whose manager is dead and whose grant has ended."""

    job: str


RefusalKind = Literal["request", "limits", "capacity"]
"""The request is wrong; deadline or budget cannot be kept; the pool is too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Tell who submitted a job why it is not taken."""

    job: str
    reason: str
    """One line: what, got what, what would do."""
    kind: RefusalKind = "request"


PoolCommand = Grant | ReturnVms | Refuse
