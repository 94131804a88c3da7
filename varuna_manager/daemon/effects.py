"""Performs the core's commands: calls clouds, runs the planner, reads the store.

Each effect runs in a thread, has a timeout, and feeds its result or its failure back as
an event. A cloud's error never raises out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from spottrain.cloud.port import errors
from spottrain.cloud.port import provider as port
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import CloudProvider, Vm
from spottrain.errors import ConfigError, UserCodeError
from spottrain.manifest import Listing, own_uids, recheck, scan
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import question_of
from spottrain.storage.open import open_store
from spottrain.storage.store import StorageError
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.daemon.market_watch import MarketWatch
from spottrain.varuna_manager.daemon.poller import CloudPoller
from spottrain.varuna_manager.daemon.ports import EventSink
from spottrain.varuna_manager.daemon.sessions import AgentSessions
from spottrain.varuna_manager.jobs import profiles
from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.identity import Identity, token_sha256
from spottrain.wire.messages import CheckpointDamaged

logger = logging.getLogger(__name__)

CALL_S = 120.0
"""How long a cloud may take to answer one call."""
LAUNCH_S = 300.0
"""How long a launch may take: some clouds make VMs one by one, and a network first."""
RELEASE_S = 660.0
"""How long removing a network may take: its VMs have to be gone first."""
STORE_PAUSE_S = 10.0
"""Between two tries to list checkpoints while their store is down."""
STORE_S = 60.0
"""How long it may be silent before that is told."""
_THREADS = 32
_STARTERS = 64
"""Agents started at the same time: each may wait for its VM to boot."""

RETRY_S = 5.0
"""When to ask again if the cloud does not say."""

_REFUSALS: dict[type[CloudError], e.RefusalKind] = {
    errors.NoCapacityError: "no_capacity",
    errors.QuotaExceededError: "quota",
    errors.RegionQuotaError: "region_quota",
    errors.PriceTooHighError: "price",
    errors.AuthError: "auth",
    errors.LoginExpiredError: "auth",
    errors.MisconfiguredError: "misconfigured",
    errors.ThrottledError: "throttled",
    errors.QueuedError: "queued",
}

P = ParamSpec("P")
R = TypeVar("R")


class EffectRunner:
    """Performs the commands of one job.

    Args:
        sink: Where events go.
        provider: The cloud to rent from.
        sessions: Agents whose tokens are admitted and revoked.
        identity: Gives VMs their tokens.
        url: Where agents reach this manager.
    """

    def __init__(
        self,
        sink: EventSink,
        provider: CloudProvider,
        sessions: AgentSessions,
        identity: Identity,
        url: str,
    ) -> None:
        self._sink = sink
        self._provider = provider
        self._sessions = sessions
        self._identity = identity
        self._url = url
        self._threads = ThreadPoolExecutor(_THREADS, "effect")
        self._starters = ThreadPoolExecutor(_STARTERS, "start")
        self._planning = asyncio.Lock()
        self._to_list = asyncio.Event()
        self._newest_plan = ""
        self._started = set[str]()
        self.market = MarketWatch(sink)
        self._parts = provider.parts()
        self.poller = CloudPoller(sink, self._parts, self._call, self.market)

    def close(self) -> None:
        """Cancel what has not begun and wait for what has: no cloud is called afterwards."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._starters.shutdown(wait=True, cancel_futures=True)

    @property
    def _job(self) -> JobSettings:
        return self._sink.state.job

    @property
    def _now_s(self) -> float:
        return self._sink.now_s()

    async def _call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the cloud in a thread.

        Raises:
            CloudError: it refused, or did not answer in time.
        """
        return await self._call_in(self._threads, CALL_S, function, *args, **kwargs)

    async def _call_in(
        self,
        threads: ThreadPoolExecutor,
        limit_s: float,
        function: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                call = partial(function, *args, **kwargs)
                return await loop.run_in_executor(threads, call)
        except TimeoutError as error:
            refusal = f"{self._provider.name} gave no answer in {limit_s:g} s"
            raise CloudError(refusal) from error
        except OSError as error:
            raise CloudError(f"{self._provider.name}: {error}") from error

    # --- commands ---------------------------------------------------------------------

    async def launch(self, command: c.LaunchVms) -> None:
        """Rent VMs for a journalled intent."""
        request = port.LaunchRequest(
            token=command.token,
            job=self._job.spec.name,
            intent=command.intent,
            offer=command.offer,
            count=command.count,
            lease_s=self._job.spec.lease_s,
            image=command.image,
        )
        try:
            result = await self._call_in(self._threads, LAUNCH_S, self._provider.launch, request)
        except CloudError as error:
            event: e.Event = e.LaunchRefused(
                at_s=self._now_s,
                intent=command.intent,
                reason=str(error),
                refusal=refusal_of(error),
                retry_after_s=retry_after_s(error),
            )
        else:
            event = e.VmsLaunched(at_s=self._now_s, intent=command.intent, vms=result.vms)
        self._sink.feed(event)

    async def start_agent(self, command: c.StartAgent) -> None:
        """Admit a VM and start its agent."""
        vm_id = command.vm_id
        if vm_id not in self._sink.state.fleet.vms:
            return
        self._started.discard(vm_id)
        token = self._identity.vm_token(vm_id)
        self._sessions.admit(vm_id, token_sha256(token))
        bootstrap = port.AgentBootstrap(
            manager_url=self._url, ca_pem=self._identity.ca_pem, token=token
        )
        try:
            start = self._provider.start_agent
            steps = await self._call_in(self._starters, CALL_S, start, vm_id, bootstrap)
        except errors.VmNotFoundError as error:
            self._sink.feed(e.VmLost(at_s=self._now_s, vm_id=vm_id, reason=str(error)))
        except UserCodeError as error:
            reason, output = str(error), error.traceback
            self._sink.feed(
                e.SetupFailed(at_s=self._now_s, vm_id=vm_id, reason=reason, output=output)
            )
        except CloudError as error:
            self._fail("start_agent", (vm_id,), error)
        else:
            self._started.add(vm_id)
            if steps:
                started = tuple(steps)
                self._sink.feed(e.AgentStarted(at_s=self._now_s, vm_id=vm_id, steps=started))

    def has_started(self, vm_id: str) -> bool:
        """Return whether the agent that a VM has is one that this manager has started."""
        return vm_id in self._started

    def _part_of(self, vm_id: str) -> CloudProvider:
        """Return the provider that a VM is from; that of all clouds if it is unknown."""
        vm = self._sink.state.fleet.vms.get(vm_id)
        return self._parts.get("" if vm is None else vm.offer.cloud, self._provider)

    async def terminate(self, command: c.TerminateVms) -> None:
        """Revoke the VMs' tokens, then return them, cloud by cloud."""
        wanted: dict[CloudProvider, list[str]] = {}
        for vm_id in command.vm_ids:
            self._sessions.revoke(vm_id)
            wanted.setdefault(self._part_of(vm_id), []).append(vm_id)
        returns = (self._return(part, tuple(ids)) for part, ids in wanted.items())
        await asyncio.gather(*returns)

    async def _return(self, part: CloudProvider, vm_ids: tuple[str, ...]) -> None:
        try:
            await self._call(part.terminate, vm_ids)
        except CloudError as error:
            self._fail("terminate_vms", vm_ids, error)
        else:
            vms = await self._ended_vms(part, vm_ids)
            self._sink.feed(e.VmsReturned(at_s=self._now_s, vm_ids=vm_ids, vms=vms))

    async def keep(self, command: c.ReserveVm) -> None:
        """Clear a VM for another job and revoke its token; return it where that fails.

        An agent whose token is revoked ends its machine: it must be gone before that.
        """
        vm_id = command.vm_id
        part = self._part_of(vm_id)
        try:
            if not part.can(CloudProvider.clear):
                self._sessions.revoke(vm_id)
                await self._return(part, (vm_id,))
                return
            await self._call(part.clear, vm_id, self._job.spec.lease_s)
            self._sessions.revoke(vm_id)
        except errors.VmNotFoundError as error:
            self._sink.feed(e.VmLost(at_s=self._now_s, vm_id=vm_id, reason=str(error)))
        except CloudError as error:
            self._fail("reserve_vm", (vm_id,), error)
        else:
            self._sink.feed(e.VmReserved(at_s=self._now_s, vm_id=vm_id))

    async def take(self, command: c.AcquireVm) -> None:
        """Take a VM over that another job keeps."""
        order = command.order
        cloud = order.kind.partition("/")[0]
        part = self._parts.get(cloud, self._provider)
        vm, reason = None, ""
        try:
            vm = await self._call(
                part.take,
                order.vm_id,
                job_dir(order.by).cloud,
                order.name,
                order.until_s,
                self._sink.state.launches.images.get(cloud, ""),
            )
        except errors.VmNotFoundError as error:
            reason = str(error)
        except CloudError as error:
            self._fail("take_vm", (order.name,), error)
            return
        self._sink.feed(e.OrderAnswered(at_s=self._now_s, order=order.name, vm=vm, reason=reason))

    async def _ended_vms(self, part: CloudProvider, vm_ids: tuple[str, ...] = ()) -> tuple[Vm, ...]:
        """Return VMs whose billing has ended, as the cloud lists them; none if it is down."""
        wanted = {*vm_ids, *self._sink.state.history.ledger.unconfirmed}
        try:
            vms = await self._call(part.list_vms, self._job.spec.name)
        except CloudError:
            return ()
        return tuple(vm for vm in vms if vm.vm_id in wanted)

    async def release(self, _: c.ReleaseJob) -> None:
        """Remove what the job's VMs shared in the cloud."""
        job, release = self._job.spec.name, self._provider.release
        try:
            await self._call_in(self._threads, RELEASE_S, release, job)
        except CloudError as error:
            self._fail("release_job", (), error)
        else:
            # Some clouds say only now when the last VMs ended.
            for part in self._parts.values():
                vms = await self._ended_vms(part)
                self._sink.feed(e.VmsReturned(at_s=self._now_s, vm_ids=(), vms=vms))
            self._sink.feed(e.JobReleased(at_s=self._now_s))

    async def cloud_time_s(self) -> float | None:
        """Return what time it is by the first cloud that tells; None if none can.

        Asks until one answers.
        """
        logged = ""
        while True:
            failures = []
            for cloud in self._parts.values():
                try:
                    time_s = await self._call(cloud.time_s)
                except CloudError as error:
                    failures.append(str(error))
                else:
                    if time_s is not None:
                        return time_s
            if not failures:
                return None
            if failures[0] != logged:
                logged = failures[0]
                logger.warning(
                    "this machine's clock cannot be compared with a cloud's, so nothing "
                    "is rented: %s",
                    logged,
                )
            await asyncio.sleep(RETRY_S)

    def unreachable_vms(self) -> Collection[str]:
        """Return the VMs that cannot call, through no fault of their own."""
        return self._provider.unreachable_vms()

    async def ask(self, command: c.AskProvider) -> None:
        """Ask the cloud whether a VM that fell silent still runs."""
        try:
            if command.vm_id in self.unreachable_vms():
                raise CloudError(f"{command.vm_id}: its region's relay is down")
            part = self._part_of(command.vm_id)
            vms = await self._call(part.list_vms, self._job.spec.name)
        except CloudError as error:
            self._fail("ask_provider", (command.vm_id,), error)
            return
        state = {vm.vm_id: vm.state for vm in vms}.get(command.vm_id)
        self._sink.feed(e.ProviderAnswered(at_s=self._now_s, vm_id=command.vm_id, state=state))

    async def plan(self, command: c.ComputePlan) -> None:
        """Compute a plan, one at a time, and only for the newest inputs."""
        self._newest_plan = command.inputs_hash
        async with self._planning:
            if self._newest_plan != command.inputs_hash:
                return
            try:
                choice = await asyncio.to_thread(choose_plan, command.inputs)
            except PlanError as error:
                self._fail("compute_plan", (), error)
                return
        event = e.PlanComputed(
            at_s=self._now_s,
            inputs_hash=command.inputs_hash,
            plan=choice.plan,
            candidates=choice.decisive,
            why_not=choice.why_not,
            question=question_of(command.inputs),
        )
        self._sink.feed(event)

    def _fail(self, command: e.FailedCommand, vm_ids: tuple[str, ...], error: Exception) -> None:
        event = e.CommandFailed(at_s=self._now_s, command=command, vm_ids=vm_ids, reason=str(error))
        self._sink.feed(event)

    # --- checkpoints and profiles ---------------------------------------------------------

    def list_checkpoints(self) -> None:
        """Have the store's checkpoints listed once more; see ``watch_store``."""
        self._to_list.set()

    async def watch_store(self) -> None:
        """Feed the complete checkpoints that the store holds, whenever they are wanted.

        While it does not answer, that is fed: if it were taken for empty, training would
        start from the beginning.
        """
        while True:
            await self._to_list.wait()
            self._to_list.clear()
            try:
                event = await self._ask_store()
            except StorageError as error:
                self._report_unreachable(str(error))
                self._to_list.set()
                await asyncio.sleep(STORE_PAUSE_S)
            else:
                self._sink.feed(event)

    async def _ask_store(self) -> e.CheckpointsListed:
        """Return what the store holds.

        Raises:
            StorageError: It cannot be asked.
        """
        asked_at_s = self._now_s
        listing = in_daemon_thread(partial(self._find_checkpoints, self._doubts()))
        while not (await asyncio.wait({listing}, timeout=STORE_S))[0]:
            place = self._job.spec.checkpoint_path
            self._report_unreachable(f"{place} has not answered for {STORE_S:g} s")
        found = listing.result()
        return e.CheckpointsListed(
            at_s=self._now_s,
            checkpoints=tuple(found.whole),
            damaged=tuple(found.damaged),
            asked_at_s=asked_at_s,
        )

    def _report_unreachable(self, reason: str) -> None:
        if reason != self._sink.state.preparation.store_error:
            self._sink.feed(e.StoreUnreachable(at_s=self._now_s, reason=reason))

    def _doubts(self) -> tuple[CheckpointDamaged, ...]:
        """Return what is damaged, as far as is known: sizes alone would not show it."""
        preparation = self._sink.state.preparation
        reported = (
            CheckpointDamaged(name=one.name, file=one.file, reason=one.reason)
            for one in preparation.doubted
            if one.file
        )
        return (*preparation.damaged, *reported)

    def _find_checkpoints(self, doubts: Sequence[CheckpointDamaged]) -> Listing:
        spec = self._job.spec
        store = open_store(spec.checkpoint_path)
        found = scan(store, own_uids(store, spec.uid))
        for doubt in doubts:
            known = {one.name for one in found.damaged}
            listed = any(one.name == doubt.name for one in found.whole)
            damaged = None
            if listed and doubt.name not in known:
                damaged = recheck(store, doubt)
            if damaged is not None:
                found.damaged.append(damaged)
        return found

    async def list_profiles(self) -> None:
        """Feed the profiles of the job's model that this machine keeps."""
        found = await asyncio.to_thread(profiles.known_profiles, self._job.facts, self._job.spec)
        self._sink.feed(e.ProfilesListed(at_s=self._now_s, profiles=found))

    async def keep_profile(self, command: c.KeepProfile) -> None:
        """Keep a profile for later jobs; a failure does not stop this one."""
        try:
            await asyncio.to_thread(profiles.keep, command.profile)
        except ConfigError as error:
            logger.warning("profile not kept: %s", error)


def in_daemon_thread(work: Callable[[], R]) -> asyncio.Future[R]:
    """Do ``work`` in a thread that no exit of this process waits for: a network file
    system may never answer."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not done.done():
            outcome()

    def run() -> None:
        outcome: Callable[[], None]
        try:
            outcome = partial(done.set_result, work())
        except Exception as error:  # noqa: BLE001  raised where it is awaited
            outcome = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="store", daemon=True).start()
    return done


def refusal_of(error: CloudError) -> e.RefusalKind:
    """Return the kind of a refusal; ``unknown`` if the error does not say."""
    return _REFUSALS.get(type(error), "unknown")


def retry_after_s(error: CloudError) -> float:
    """Return how many seconds to wait before asking again."""
    return error.retry_after_s if isinstance(error, errors.ThrottledError) else RETRY_S
