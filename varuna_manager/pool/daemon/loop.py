"""A pool in real time: what happens is journalled with what was decided, then performed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from spottrain.errors import BudgetError, CapacityError, ConfigError, SpottrainError
from spottrain.eventlog.loop import Loop
from spottrain.varuna_manager.config.pool import PoolConfig, parse_pool, weight_of
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    JobRequest,
    JobRequested,
    PoolClosed,
    PoolCommand,
    PoolEvent,
    PoolJobEnded,
    PoolJobPaused,
    PoolJobPhase,
    PoolSettingsChanged,
    PoolStarted,
    PoolState,
    PoolTimerFired,
    PriorityChanged,
    Refuse,
    ReturnVms,
    SuppliesChanged,
    Supply,
)
from spottrain.varuna_manager.pool.core.step import step
from spottrain.varuna_manager.pool.daemon.managers import JobManagers
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.varuna_manager.pool.store.journal import PoolJournal, PoolStep
from spottrain.varuna_manager.pool.store.settings import settings_of, vms_of

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause before a manager that could not be told is told again."""
TICK_S = 0.25
"""Time between two looks at the jobs' journals."""
REFUSALS: dict[str, type[SpottrainError]] = {
    "request": ConfigError,
    "limits": BudgetError,
    "capacity": CapacityError,
}


class PoolLoop(Loop[PoolState, PoolEvent, PoolCommand]):
    """One pool.

    Args:
        pool: Its folder.
        journal: Open for writing; it has a first event.
    """

    def __init__(self, pool: PoolDir, journal: PoolJournal) -> None:
        super().__init__(journal, journal.replay())
        self._pool = pool
        self._config = pool.config()
        self._managers = JobManagers(pool.name, self.state.supplies)
        self._performing: dict[str, asyncio.Task[None]] = {}
        """By job: one thing at a time."""
        self._grants: dict[str, Grant] = {}
        """To be told, the newest of each job."""
        self._wake = asyncio.Event()
        self._setting, self._supplying = asyncio.Lock(), asyncio.Lock()
        # One thread: SQLite's connections stay in the thread that opened them.
        self._reader = ThreadPoolExecutor(max_workers=1)

    async def run(self) -> None:
        """Serve the pool until it is closed and nothing of it is held.

        Raises:
            JournalError: The journal cannot be written any more.
        """
        self.feed(PoolStarted(at_s=self.now_s()))
        self._start(self._watch())
        await self.take_events()

    async def _watch(self) -> None:
        """Look at the jobs until the pool is over."""
        while not self._is_over():
            await self._tick()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
        for name in await asyncio.to_thread(self._end_jobs):
            await self.feed(PoolJobEnded(at_s=self.now_s(), job=name))
        self._pool.mark_down()
        self._end(None)

    def now_s(self) -> float:
        """Seconds since the epoch; never less than before."""
        return max(time.time(), self._ahead.now_s)

    def _perform(self, command: PoolCommand) -> None:
        match command:
            case Grant(job=name):
                self._grants[name] = command
                self._wake.set()
            case ReturnVms(job=name):
                self._begin(name, self._return_vms(name))
            case Refuse():
                pass  # who asked looks at it

    def _note(self, step: PoolStep) -> None:
        for name, job in step.after.jobs.items():
            old = step.before.jobs.get(name)
            if old is None or old.granted != job.granted or old.phase is not job.phase:
                logger.info(
                    "%s: %s, %s of %s granted, after %s",
                    *(name, job.phase.value, job.granted, job.target),
                    type(step.event).__name__,
                )

    # --- Ticks ----------------------------------------------------------------------------

    async def _tick(self) -> None:
        now_s = self.now_s()
        busy = frozenset(self._performing)
        looking = asyncio.get_running_loop()
        found = await looking.run_in_executor(
            self._reader, self._managers.look, self.state, now_s, busy
        )
        await asyncio.gather(*(self.feed(replace(one, at_s=self.now_s())) for one in found))
        if self.state.timer_s <= self.now_s():
            await self.feed(PoolTimerFired(at_s=self.now_s()))
        await self._change_supplies(self._managers.priced)
        for name in tuple(self._grants):
            if name not in self._performing:
                self._begin(name, self._give(name))

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Perform something for a job, unless something is under way: it is asked again."""
        if name in self._performing:
            work.close()
            return
        task = self._performing[name] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._performed(name, task))

    def _performed(self, name: str, task: asyncio.Task[None]) -> None:
        self._performing.pop(name, None)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: %s", name, error, exc_info=error)

    async def _give(self, name: str) -> None:
        grant = self._grants.pop(name)
        if not await asyncio.to_thread(self._managers.give, grant):
            await asyncio.sleep(RETRY_S)
            self._grants.setdefault(name, grant)  # unless there is a newer one

    async def _return_vms(self, name: str) -> None:
        listed = await asyncio.to_thread(self._managers.return_vms, name)
        if listed is not None:
            await self.feed(replace(listed, at_s=self.now_s()))
        else:
            await asyncio.sleep(5.0)

    async def _settings_changed(self, config: PoolConfig) -> None:
        """Feed what the pool file says now, and store it."""
        settings = settings_of(config)
        self._config = config
        await self.feed(PoolSettingsChanged(at_s=self.now_s(), settings=settings))
        self._pool.write(config)
        await self._change_supplies(
            lambda supplies: tuple(replace(one, vms=vms_of(config, one.name)) for one in supplies)
        )

    async def _change_supplies(
        self, changed: Callable[[tuple[Supply, ...]], tuple[Supply, ...]]
    ) -> None:
        """Feed what the pool may hold now, and at which prices."""
        async with self._supplying:  # a change is made on what the last one has left
            supplies = changed(self.state.supplies)
            if supplies != self.state.supplies:
                await self.feed(SuppliesChanged(at_s=self.now_s(), supplies=supplies))

    def _is_over(self) -> bool:
        jobs = self.state.jobs.values()
        runs = any(job.runs for job in jobs)
        return self.state.is_closed and not runs and not self._performing

    def _end_jobs(self) -> list[str]:
        """End the jobs of a pool that is taken down: their checkpoints stay; return them."""
        ended: list[str] = []
        for name, job in self.state.jobs.items():
            if job.phase is PoolJobPhase.ENDED:
                continue
            try:
                self._managers.end(name)
            except SpottrainError as error:
                logger.error("%s: %s", name, error)
            else:
                ended.append(name)
        return ended

    # --- Requests -------------------------------------------------------------------------

    async def submit(self, request: JobRequest, secrets: dict[str, str]) -> dict[str, Any]:
        """Take a job, or refuse it.

        Raises:
            SpottrainError: It is refused; says why, and what would do.
        """
        self._managers.secrets[request.uid] = secrets  # before its manager may be started
        commands = await self.feed(JobRequested(at_s=self.now_s(), request=request))
        try:
            _raise_refusal(commands)
        except SpottrainError:
            self._managers.secrets.pop(request.uid, None)
            raise
        self._wake.set()
        return {
            "job": request.name,
            "starts": any(self.state.jobs[request.name].target),
        }

    def plan(self, request: JobRequest) -> dict[str, Any]:
        """Return what would come of a job, without taking it.

        Raises:
            SpottrainError: It would be refused.
        """
        before = self.state
        after, commands = step(before, JobRequested(at_s=self.now_s(), request=request))
        _raise_refusal(commands)
        return {
            "kinds": [supply.name for supply in after.supplies],
            "target": list(after.jobs[request.name].target),
            "examples_per_s": after.jobs[request.name].rate(after.jobs[request.name].target),
            "others": {
                name: {
                    "before": list(job.target),
                    "after": list(after.jobs[name].target),
                    "examples_per_s_before": job.rate(job.target),
                    "examples_per_s_after": after.jobs[name].rate(after.jobs[name].target),
                }
                for name, job in before.jobs.items()
                if before.takes_part(job)
            },
        }

    async def set(self, changes: dict[str, Any]) -> None:
        """Change keys of the pool file, or a job's priority (``jobs.NAME.priority``).

        Raises:
            ConfigError: A key or a value is wrong.
        """
        async with self._setting:  # a change is made on what the last one has left
            await self._set(changes)

    async def _set(self, changes: dict[str, Any]) -> None:
        data = self._config.model_dump(mode="json", exclude_unset=True)
        weights: list[tuple[str, float]] = []
        for key, value in changes.items():
            first, *rest = key.split(".")
            if first == "jobs" and len(rest) == 2 and rest[1] == "priority":
                weights.append((self._active(rest[0]), weight_of(value, key)))
            elif first in (
                "max_vms",
                "budget",
                "policy",
                "teams",
                "min_stay_s",
                "round_s",
            ):
                _put(data, key.split("."), value)
            else:
                raise ConfigError(
                    f"{key}: cannot be changed; these can: max_vms, policy, budget.max_usd, "
                    "budget.max_usd_per_hour, teams.NAME.weight, its order and caps, "
                    "min_stay_s, round_s, jobs.NAME.priority"
                )
        config = parse_pool(data, "set")
        for name, weight in weights:
            await self.feed(PriorityChanged(at_s=self.now_s(), job=name, weight=weight))
        if config != self._config:
            await self._settings_changed(config)

    async def pause(self, name: str, *, is_paused: bool) -> None:
        """Pause a job, or let it go on, also after it has failed.

        Raises:
            ConfigError: The pool has no such job, or it has ended for good.
        """
        if is_paused or not self._managers.can_go_on(self._known(name)):
            self._active(name)
        self._managers.of(name).starts = 0
        await self.feed(PoolJobPaused(at_s=self.now_s(), job=name, is_paused=is_paused))

    def _known(self, name: str) -> str:
        if name not in self.state.jobs:
            known = ", ".join(self.state.jobs) or "none"
            raise ConfigError(f"pool {self._pool.name} has no job {name}; its jobs: {known}")
        return name

    def _active(self, name: str) -> str:
        if self.state.jobs[self._known(name)].phase is PoolJobPhase.ENDED:
            raise ConfigError(f"job {name} has ended; see 'spottrain report {name}'")
        return name

    async def close(self) -> None:
        """Take the pool down: jobs checkpoint, return their VMs, and end."""
        await self.feed(PoolClosed(at_s=self.now_s()))


def _raise_refusal(commands: Iterable[PoolCommand]) -> None:
    for command in commands:
        if isinstance(command, Refuse):
            raise REFUSALS[command.kind](command.reason)


def _put(data: dict[str, Any], path: list[str], value: Any) -> None:
    """Put a value where a path of keys leads; None: nothing is there any more."""
    *way, last = path
    place = data
    for part in way:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{'.'.join(path)}: unknown key")
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value
