"""The managers of a pool's jobs, as the pool sees and reaches them.

What a job holds, has spent and has trained is read from its journal: nothing is rented
before it is there, so that the pool never believes less than there is. The grant that a
journal names is the one that its manager follows.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from spottrain.errors import SpottrainError
from spottrain.varuna_manager.core.model.records import OrderPhase
from spottrain.varuna_manager.core.model.settings import PoolGrant, VmOrder
from spottrain.varuna_manager.core.model.state import (
    JobPhase,
    State,
    held_by_kind,
    kind_of,
)
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import Follower, folder_of, read_state
from spottrain.varuna_manager.launch import control
from spottrain.varuna_manager.launch.data import local_data
from spottrain.varuna_manager.launch.submit import can_be_resumed
from spottrain.varuna_manager.offers.fleets import JobThroughputs
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    HoldingsListed,
    HoldingsReported,
    PoolEvent,
    PoolJob,
    PoolJobEnded,
    PoolJobPaused,
    PoolJobPhase,
    PoolState,
    ReservedVm,
    Supply,
    Throughputs,
)

logger = logging.getLogger(__name__)

REPORT_S = 15.0
"""Time between reports of a job of which nothing but money and progress changes."""
CORRECT_S = 10.0
"""Time between two looks at what a job's measurements say of its throughputs."""
START_PAUSES_S = (0.0, 2.0, 10.0, 30.0)
"""Pauses before a job's manager is started again that has died; then the job is paused."""
_FINAL = ("succeeded", "failed", "deadline", "budget", "capacity")


@dataclass
class WatchedJob:
    """A job as the pool's process sees and reaches it, beside the core's state."""

    folder: JobDir
    throughputs: JobThroughputs
    follower: Follower | None = None
    reported: HoldingsReported | None = None
    seen: State | None = None
    """Its state, when it was last found what is to be reported."""
    corrected_s: float = 0.0
    manager: subprocess.Popen[bytes] | None = None
    is_alive: bool = False
    """Whether its manager ran at the last look, or was started since."""
    started_s: float = 0.0
    starts: int = 0
    """Starts of its manager since it last trained."""
    secrets: Mapping[str, str] = field(default_factory=dict)

    def state(self) -> State:
        """Return the job's state.

        Raises:
            JournalError: The journal is missing or damaged.
        """
        if self.follower is None:
            self.follower = Follower(self.folder, from_now=True)
        for _ in self.follower.advance():
            pass
        return self.follower.state

    @property
    def gives_up(self) -> bool:
        """Whether its manager was started in vain too often."""
        return self.starts >= len(START_PAUSES_S)

    def is_managed(self) -> bool:
        """Return whether its manager runs."""
        if self.manager is not None and self.manager.poll() is None:
            return True
        return self.folder.is_managed()

    def is_down(self) -> bool:
        """Return whether a person has ended it for good."""
        return self.folder.is_down

    def start(self) -> None:
        """Start its manager.

        Raises:
            SpottrainError, OSError: It cannot be started.
        """
        config = self.folder.config()
        environment = {**os.environ, **config.env, **self.secrets}
        if config.resources.provider == "local":
            environment |= local_data(config.data)
        self.manager = self.folder.start(environment)

    def tell(self, grant: PoolGrant) -> None:
        """Tell its manager, or its journal, what it is granted.

        Raises:
            SpottrainError: It does not know.
        """
        control.give_grant(self.folder, grant)

    def returned(self) -> State:
        """Return its VMs, as its manager is dead; return its state then.

        Raises:
            SpottrainError: A cloud refuses, or does not answer.
        """
        control.return_vms(self.folder)
        return read_state(self.folder)


class JobManagers:
    """The managers of all jobs of a pool.

    Args:
        supplies: The pool's kinds of VM.
        watch: Returns a job by its name; None: those of this machine.
    """

    def __init__(
        self,
        pool: str,
        supplies: tuple[Supply, ...],
        watch: Callable[[str], WatchedJob] | None = None,
    ) -> None:
        self._pool = pool
        self._kinds = [supply.name for supply in supplies]
        self._watch = watch or self._watch_here
        self._watched: dict[str, WatchedJob] = {}
        self._uids: dict[str, str] = {}
        """Of jobs, by name."""
        self.secrets: dict[str, Mapping[str, str]] = {}
        """Environment variables of managers that are not on disk, by the jobs' uids."""
        self._prices: dict[str, float] = {}
        """The highest price that a running job sees of each kind, USD per hour."""

    def of(self, name: str) -> WatchedJob:
        """Return what is known of a job."""
        if name not in self._watched:
            self._watched[name] = self._watch(name)
        return self._watched[name]

    def _watch_here(self, name: str) -> WatchedJob:
        folder = folder_of(name, self._uids.get(name, ""))
        return WatchedJob(folder, JobThroughputs(self._kinds))

    def begin(self, name: str, uid: str) -> None:
        """Note whose a name is from now on."""
        if self._uids.get(name) != uid:
            self._uids[name] = uid
            self._watched.pop(name, None)

    # --- Looking --------------------------------------------------------------------------

    def look(self, state: PoolState, now_s: float, busy: Collection[str] = ()) -> list[PoolEvent]:
        """Return what is new of the pool's jobs, and start managers that are missing.

        Always in the same thread.

        Args:
            now_s: Seconds since the epoch.
            busy: Jobs that are being told something; no manager of them is started.
        """
        found: list[PoolEvent] = []
        for name, job in state.jobs.items():
            self.begin(name, job.request.uid)
            if job.phase is PoolJobPhase.ENDED and not job.runs:
                continue
            try:
                found += self._look_at(self.of(name), job, now_s)
                if name not in busy:
                    self._ensure(job, now_s)
            except SpottrainError as error:
                logger.warning("%s: %s", name, error)
        return found

    def _look_at(self, watched: WatchedJob, job: PoolJob, now_s: float) -> Iterator[PoolEvent]:
        is_alive = watched.is_managed()
        was_alive, watched.is_alive = watched.is_alive, is_alive
        state, name = watched.state(), job.request.name
        measured = self._corrected(watched, state, job, now_s)
        if state.market.offers and is_alive:
            self._note_prices(state)
        is_same = state is watched.seen and is_alive == was_alive and measured is None
        if is_same and not _is_due(watched, now_s):
            return
        held = held_by_kind(state)
        asked = _orders_of(state, OrderPhase.ASKED)
        if not is_alive and (held or asked) and state.phase is not JobPhase.ENDED:
            return  # its manager is dead, and may have rented more than it could say
        watched.seen = state
        ended = state.phase is JobPhase.ENDED
        at_s = state.now_s if ended else max(now_s, state.now_s)
        report = HoldingsReported(
            at_s=now_s,
            job=name,
            serial=state.job.grant.serial if state.job.grant else 0,
            held=tuple(held[kind] for kind in self._kinds),
            spent=state.history.ledger.spent(at_s).microusd,
            examples_done=float(state.history.progress.step * state.job.spec.minibatch_size),
            throughputs=measured,
            kept=tuple(
                ReservedVm(vm_id=vm_id, supply=self._kinds.index(kind_of(vm.offer)))
                for vm_id, vm in state.fleet.vms.items()
                if vm.reserved_at_s is not None
            ),
            taken=_orders_of(state, OrderPhase.TAKEN),
            open=frozenset() if watched.is_down() else _open_orders(state, now_s),
            is_ending=_is_ending(state, job, is_alive=is_alive),
            idle_asked_s=state.fleet.idle_asked_s,
        )
        if _has_changes(watched.reported, report):
            watched.reported = report
            yield report
        if state.history.progress.step and is_alive and held:
            watched.starts = 0
        if job.phase is not PoolJobPhase.ENDED and not is_alive:
            yield from self._after(watched, state, job, now_s, has_ended=was_alive)

    def _after(
        self,
        watched: WatchedJob,
        state: State,
        job: PoolJob,
        now_s: float,
        *,
        has_ended: bool,
    ) -> Iterator[PoolEvent]:
        """Yield what the end of a manager means.

        Args:
            state: Its state.
            job: The same job, as the pool's core knows it.
            now_s: Seconds since the epoch.
            has_ended: Whether its manager has ended just now.
        """
        name = job.request.name
        kind = _ended_as(state, job)
        if watched.is_down() or kind in _FINAL:
            yield PoolJobEnded(at_s=now_s, job=name)
        elif (kind == "stopped" and has_ended) or watched.gives_up:
            watched.starts = 0
            yield PoolJobPaused(at_s=now_s, job=name, is_paused=True)

    def _corrected(
        self, watched: WatchedJob, state: State, job: PoolJob, now_s: float
    ) -> Throughputs | None:
        """Return throughputs that measurements have changed."""
        if state.training.generation is None or now_s < watched.corrected_s + CORRECT_S:
            return None
        watched.corrected_s = now_s
        found = watched.throughputs.of(state, state.market.offers)
        if found is None or _about_equal(found, job.request.throughputs):
            return None
        return found

    def _note_prices(self, state: State) -> None:
        for offer in state.market.offers:
            if offer.spot or state.job.resources.allow_on_demand:
                kind = f"{offer.cloud}/{offer.instance_type}"
                self._prices[kind] = max(self._prices.get(kind, 0.0), offer.usd_per_hour)

    def priced(self, supplies: tuple[Supply, ...]) -> tuple[Supply, ...]:
        """Return supplies at the prices that running jobs have seen since the last call."""
        prices, self._prices = self._prices, {}
        return tuple(
            replace(s, microusd_per_hour=round(prices[s.name] * 1e6)) if s.name in prices else s
            for s in supplies
        )

    # --- Performing -----------------------------------------------------------------------

    def give(self, grant: Grant) -> bool:
        """Tell a job what it is granted; return whether it knows."""
        watched = self.of(grant.job)
        pool_grant = PoolGrant(
            pool=self._pool,
            serial=grant.serial,
            vms=tuple(zip(self._kinds, grant.vms, strict=True)),
            until_s=grant.until_s,
            max_microusd=grant.allowance,
            orders=tuple(
                VmOrder(
                    name=order.name,
                    vm_id=order.vm_id,
                    kind=self._kinds[order.supply],
                    by=order.by,
                    until_s=order.until_s,
                )
                for order in grant.orders
            ),
            reservation_s=grant.reservation_s,
            idle_s=grant.idle_s,
        )
        try:
            watched.tell(pool_grant)
        except SpottrainError as error:
            logger.warning("%s: %s", grant.job, error)
            return False
        return True

    def _ensure(self, job: PoolJob, now_s: float) -> None:
        """Start the manager of a job that may have or is granted VMs, if none runs."""
        watched = self.of(job.request.name)
        if watched.is_alive or watched.gives_up:
            return
        is_granted = any(job.granted) and now_s < job.until_s
        may_hold = any(job.held) or any(job.held_upper_bound)  # more than it could say
        is_left = may_hold or bool(job.orders) or bool(job.gone)
        if not is_left and not is_granted:
            return
        if now_s < watched.started_s + START_PAUSES_S[watched.starts]:
            return
        try:
            if not _has_to_run(watched.state(), job, now_s):
                return
            watched.secrets = self.secrets.get(job.request.uid, {})
            watched.start()
        except (SpottrainError, OSError) as error:
            logger.warning("%s: its manager cannot be started: %s", watched.folder.name, error)
        else:
            watched.is_alive = True
            logger.info("%s: its manager is started", watched.folder.name)
        watched.started_s, watched.starts = now_s, watched.starts + 1

    def return_vms(self, name: str) -> HoldingsListed | None:
        """Return what a job holds whose manager is dead; say what it holds then."""
        try:
            state = self.of(name).returned()
        except SpottrainError as error:
            logger.warning("%s: %s", name, error)  # it is asked for again
            return None
        held = held_by_kind(state)
        return HoldingsListed(
            at_s=time.time(),
            job=name,
            held=tuple(held[kind] for kind in self._kinds),
            spent=state.history.ledger.spent(state.now_s).microusd,
        )

    def can_go_on(self, name: str) -> bool:
        """Return whether a job of this pool has not ended for good; it may have failed."""
        folder = self.of(name).folder
        try:
            grant = read_state(folder).job.grant
        except SpottrainError:
            return False
        # Its name may have been taken since by a job that is not the pool's.
        is_ours = grant is not None and grant.pool == self._pool
        return is_ours and can_be_resumed(folder)

    def end(self, name: str) -> None:
        """End a job for good; its report and its checkpoints stay.

        Raises:
            SpottrainError: Something of it may still be rented.
        """
        if not self.of(name).is_down():
            control.end_job(self.of(name).folder)


def _ended_as(state: State, job: PoolJob) -> str:
    """Return the kind of a job's outcome; empty if it has none since a person resumed it."""
    if state.phase is not JobPhase.ENDED or state.outcome is None:
        return ""
    return state.outcome.kind if (state.ending_since_s or 0) >= job.resumed_s else ""


def _is_ending(state: State, job: PoolJob, *, is_alive: bool) -> bool:
    """Return whether a job is done, though it may hold VMs yet, and its manager run."""
    outcome = state.outcome
    if state.phase is JobPhase.ENDED:
        return _ended_as(state, job) in _FINAL
    is_over = state.phase is JobPhase.ENDING and outcome is not None
    return is_alive and is_over and outcome is not None and outcome.kind in _FINAL


def _has_to_run(state: State, job: PoolJob, now_s: float) -> bool:
    """Return whether a job without a manager needs one: to train, or to return VMs."""
    is_rented = bool(held_by_kind(state)) or bool(_orders_of(state, OrderPhase.ASKED))
    if state.phase is not JobPhase.ENDED and is_rented:
        return True
    grant = state.job.grant
    if grant is None or _ended_as(state, job) in _FINAL:
        return False
    return grant.total > 0 and now_s < grant.until_s


def _is_due(watched: WatchedJob, now_s: float) -> bool:
    """Return whether there may be something to report of a job whose state is the same."""
    before = watched.reported
    if before is None or now_s >= before.at_s + REPORT_S:
        return True
    return bool(before.open) or watched.gives_up or watched.is_down()


def _has_changes(before: HoldingsReported | None, now: HoldingsReported) -> bool:
    if before is None or now.at_s >= before.at_s + REPORT_S:
        return True
    if now.throughputs is not None:
        return True
    return any(
        getattr(before, name) != getattr(now, name)
        for name in ("serial", "held", "kept", "taken", "open", "is_ending", "idle_asked_s")
    )


def _orders_of(state: State, phase: OrderPhase) -> frozenset[str]:
    return frozenset(k for k, one in state.fleet.orders.items() if one.phase is phase)


def _open_orders(state: State, now_s: float) -> frozenset[str]:
    """Return the orders by which a job may get a VM yet, or may have got one.

    Args:
        now_s: A time before the state was read.
    """
    orders = () if state.job.grant is None else state.job.grant.orders
    unasked = frozenset(
        order.name
        for order in orders
        if order.name not in state.fleet.orders and now_s <= order.until_s
    )
    return unasked | _orders_of(state, OrderPhase.ASKED)


def _about_equal(new: Throughputs, old: Throughputs) -> bool:
    """Return whether throughputs differ by less than is worth a decision."""
    for ours, theirs in zip(new, old, strict=True):
        if [n for n, _ in ours] != [n for n, _ in theirs]:
            return False
        pairs = zip(ours, theirs, strict=True)
        if any(abs(a - b) > 0.1 * max(a, b) for (_, a), (_, b) in pairs):
            return False
    return True
