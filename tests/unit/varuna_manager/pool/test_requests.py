"""What a pool's daemon answers to people, without its process: refusals and resumed jobs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.test_simulation import settings

from spottrain.errors import SpottrainError
from spottrain.varuna_manager.config.pool import parse_pool
from spottrain.varuna_manager.core.model.events import (
    CommandFailed,
    JobSubmitted,
    ManagerStarted,
)
from spottrain.varuna_manager.core.model.settings import PoolGrant
from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch.submit import end_of
from spottrain.varuna_manager.offers.fleets import JobThroughputs
from spottrain.varuna_manager.pool.core.model import (
    HoldingsReported,
    JobRequest,
    Limits,
    PoolCreated,
    PoolEvent,
    PoolJobEnded,
    PoolJobPhase,
    PoolSettingsChanged,
    PoolState,
    Team,
)
from spottrain.varuna_manager.pool.daemon.loop import PoolLoop
from spottrain.varuna_manager.pool.daemon.managers import JobManagers, WatchedJob
from spottrain.varuna_manager.pool.report.document import status
from spottrain.varuna_manager.pool.store.folder import PoolDir, create_pool
from spottrain.varuna_manager.pool.store.journal import PoolJournal
from spottrain.varuna_manager.pool.store.settings import settings_of, supplies_of


class Served:
    """A pool that takes events, and does not look at its jobs."""

    def __init__(self, runner: asyncio.Runner, pool: PoolLoop) -> None:
        self._runner, self._pool = runner, pool
        self._taking = self._run(self._begin())

    async def _begin(self) -> asyncio.Task[Any]:
        return asyncio.create_task(self._pool.take_events())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    @property
    def state(self) -> PoolState:
        return self._pool.state

    def now_s(self) -> float:
        return self._pool.now_s()

    def feed(self, event: PoolEvent) -> None:
        async def journalled() -> None:
            taken = self._pool.feed(event)
            await asyncio.wait((taken, self._taking), return_when=asyncio.FIRST_COMPLETED)
            if self._taking.done():
                self._taking.result()

        self._run(journalled())

    def submit(self, asked: JobRequest) -> Any:
        return self._run(self._pool.submit(asked, {}))

    def set(self, changes: dict[str, Any]) -> None:
        self._run(self._pool.set(changes))

    def pause(self, name: str, *, is_paused: bool) -> None:
        self._run(self._pool.pause(name, is_paused=is_paused))


@pytest.fixture
def loop() -> Iterator[Served]:
    config = parse_pool({"name": "lab", "max_vms": 4}, "lab.yaml")
    supplies = supplies_of(config, {"local/cpu": 1.0})
    created = PoolCreated(at_s=0.0, settings=settings_of(config), supplies=supplies)
    pool = create_pool(config, created)
    with closing(PoolJournal(pool.journal)) as journal, asyncio.Runner() as runner:
        yield Served(runner, PoolLoop(pool, journal))


def request(**given: Any) -> JobRequest:
    table = ((1, 1.0), (2, 2.0))
    defaults: dict[str, Any] = {"name": "job", "throughputs": (table,), **given}
    return JobRequest(examples=7200.0, **defaults)


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"name": "first"}, 2, "the pool has a job of that name"),
        ({"team": "poets"}, 2, "the pool has none"),
        ({"deadline_s": 1.0}, 4, "deadline"),
        ({"limits": Limits(max_microusd=1e6)}, 4, "costs at least 2.00 USD"),
        ({"throughputs": (((9, 1.0),),)}, 5, "larger than the pool"),
    ],
)
def test_a_job_that_cannot_be_promised_is_refused_with_its_exit_code(
    loop: Served, given: dict[str, Any], code: int, words: str
) -> None:
    assert loop.submit(request(name="first")) == {"job": "first", "starts": True}
    with pytest.raises(SpottrainError, match=words) as refused:
        loop.submit(request(**given))
    assert refused.value.exit_code == code
    assert list(loop.state.jobs) == ["first"], "what is refused leaves nothing"


TIGHT = Limits(max_vms=4, max_microusd=1e7, max_microusd_per_hour=2e6)


@pytest.mark.parametrize(
    ("given", "changes", "code", "words"),
    [
        ({}, {"limits": Limits(max_microusd_per_hour=1e5)}, 5, "than the pool's caps"),
        ({"team": "a"}, {}, 5, "job: larger than the caps of team a at its smallest"),
        ({"team": "b"}, {}, 5, "larger than the caps of team b"),
        ({"limits": Limits(max_vms=1)}, {}, 5, "larger than its own caps at"),
        ({"team": "c"}, {}, 4, "budget of team c: got 3.00 USD; its work costs at"),
        ({}, {"limits": Limits(max_microusd=3e6)}, 4, "budget of the pool: got 3.00"),
        (
            {},
            {"limits": Limits(max_microusd=1e3), "budget_per": "month"},
            4,
            "pool: got 0.001000 USD; to begin costs 0.71 USD",
        ),
    ],
)
def test_a_job_that_caps_never_let_begin_is_refused(
    loop: Served,
    given: dict[str, Any],
    changes: dict[str, Any],
    code: int,
    words: str,
) -> None:
    teams = {
        "a": Team(limits=Limits(max_vms=1)),
        "b": Team(limits=Limits(max_microusd_per_hour=1.5e6)),
        "c": Team(limits=Limits(max_microusd=3e6)),
    }
    pool = replace(loop.state.settings, teams=teams, **{"limits": TIGHT, **changes})
    loop.feed(PoolSettingsChanged(at_s=loop.now_s(), settings=pool))
    asked = {"throughputs": (((2, 1.0),),), **given}
    with pytest.raises(SpottrainError, match=words) as refused:
        loop.submit(request(**asked))
    assert refused.value.exit_code == code


def test_what_was_spent_already_does_not_pay_for_a_job(loop: Served) -> None:
    loop.submit(request(name="first"))
    loop.feed(
        HoldingsReported(
            at_s=loop.now_s(), job="first", serial=0, held=(0,), spent=9_000_000, examples_done=0.0
        )
    )
    pool = replace(loop.state.settings, limits=TIGHT)
    loop.feed(PoolSettingsChanged(at_s=loop.now_s(), settings=pool))
    with pytest.raises(SpottrainError, match="its work costs at least 2"):
        loop.submit(request())


def test_a_deadline_that_a_cap_forbids_is_refused_soon(loop: Served) -> None:
    """Once it is missed by whatever is allowed, nothing more is followed in time."""
    teams = {"a": Team(limits=Limits(max_vms=1))}
    pool = replace(loop.state.settings, teams=teams)
    loop.feed(PoolSettingsChanged(at_s=loop.now_s(), settings=pool))
    asked = request(team="a", deadline_s=loop.now_s() + 360_000)
    with pytest.raises(SpottrainError, match="the pool needs 4"):
        loop.submit(replace(asked, examples=1.44e6))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("round_s", 1e308, "less than or equal to"),
        ("min_stay_s", 0.0, "greater than"),
        ("teams..weight", 2.0, "teams"),
        ("teams.A B.weight", 2.0, "teams"),
    ],
)
def test_odd_settings_are_refused_and_change_nothing(
    loop: Served, key: str, value: float, words: str
) -> None:
    before = loop.state.settings
    with pytest.raises(SpottrainError, match=words):
        loop.set({key: value})
    assert loop.state.settings == before
    assert PoolDir.named("lab").config().round_s == before.round_s


def test_a_team_is_made_and_removed(loop: Served) -> None:
    loop.set({"teams.visoin.weight": 3.0})
    assert loop.state.settings.teams["visoin"].weight == 3.0
    loop.set({"teams.visoin": None})
    assert loop.state.settings.teams == {}


def write_job(*ends: Any, pool: str = "lab", uid: str = "uid", name: str = "job") -> None:
    """Write the journal of a job of a pool."""
    folder = job_dir(name)
    folder.path.mkdir(parents=True)
    grant = PoolGrant(
        pool=pool,
        serial=0,
        vms=(("local/cpu", 2),),
        until_s=1e6,
        max_microusd=10**9,
    )
    asked = replace(settings(grant=grant), uid=uid)
    with closing(Journal(folder.journal)) as journal:
        journal.record(JobSubmitted(at_s=1.0, settings=asked), *ends)


FAILED = CommandFailed(at_s=2.0, command="compute_plan", vm_ids=(), reason="no fleet could run it")


def end(loop: Served) -> None:
    loop.submit(request())
    loop.feed(PoolJobEnded(at_s=loop.now_s(), job="job"))


def test_a_job_that_has_failed_goes_on_and_does_not_end_by_its_old_outcome(
    loop: Served,
) -> None:
    write_job(FAILED)
    assert end_of(job_dir("job")) == "failed"
    end(loop)
    loop.pause("job", is_paused=False)
    assert loop.state.jobs["job"].phase is PoolJobPhase.ACTIVE
    assert any(loop.state.jobs["job"].granted)
    seen = JobManagers("lab", loop.state.supplies).look(loop.state, math.inf, ["job"])
    assert not any(isinstance(event, PoolJobEnded) for event in seen)


def test_a_job_of_that_name_that_is_not_the_pools_is_left_alone(loop: Served) -> None:
    write_job(FAILED, pool="other")
    end(loop)
    with pytest.raises(SpottrainError, match="job job has ended"):
        loop.pause("job", is_paused=False)
    with pytest.raises(SpottrainError, match="has no job poet"):
        loop.pause("poet", is_paused=False)


def test_another_job_that_has_taken_the_name_is_neither_watched_nor_told(
    loop: Served,
) -> None:
    loop.submit(request(uid="ours"))
    write_job(FAILED, uid="ours", name="job.1")
    job_dir("job.1").mark_down()
    write_job(ManagerStarted(at_s=1.0, software_version="1", pid=1), uid="theirs")
    managers = JobManagers("lab", loop.state.supplies)
    seen = managers.look(loop.state, loop.now_s())
    assert PoolJobEnded in map(type, seen)
    assert managers.of("job").folder == job_dir("job.1")
    for event in seen:
        loop.feed(event)
    assert status(PoolDir.named("lab"))["jobs"][0]["state"] == "failed"
    managers.end("job")
    assert not job_dir("job").is_down


class NotedJob(WatchedJob):
    """A job whose manager is not really started."""

    def start(self) -> None:
        pass


def test_a_manager_that_died_before_it_could_say_what_it_holds_is_started(
    loop: Served,
) -> None:
    write_job(ManagerStarted(at_s=1.0, software_version="1", pid=1))
    loop.submit(request())
    unheard = replace(
        loop.state.jobs["job"],
        granted=(0,),
        held=(0,),
        held_upper_bound=(2,),
        until_upper_bound_s=1e9,
    )
    job = NotedJob(folder=job_dir("job"), throughputs=JobThroughputs(()))
    managers = JobManagers("lab", loop.state.supplies, lambda _: job)
    starts = []
    for held_upper_bound in ((0,), (2,)):
        managers.look(loop.state.with_job(replace(unheard, held_upper_bound=held_upper_bound)), 1e3)
        starts.append(job.starts)
    assert starts == [0, 1]
