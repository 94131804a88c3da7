"""What a pool's daemon answers to people, without its process: refusals and resumed jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.market import offer
from tests.simulation.test_simulation import settings

from spottrain.errors import SpottrainError
from spottrain.varuna_manager.config.pool import parse_pool
from spottrain.varuna_manager.core.model.events import (
    CommandFailed,
    JobSubmitted,
    LaunchIntended,
    ManagerStarted,
)
from spottrain.varuna_manager.core.model.settings import PoolGrant
from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch.submit import end_of
from spottrain.varuna_manager.offers.fleets import JobThroughputs
from spottrain.varuna_manager.pool.core.model import (
    JobRequest,
    Limits,
    PoolJobEnded,
    PoolJobPhase,
    PoolStarted,
    PoolState,
)
from spottrain.varuna_manager.pool.daemon.loop import PoolLoop
from spottrain.varuna_manager.pool.daemon.managers import JobManagers, WatchedJob
from spottrain.varuna_manager.pool.store.folder import create_pool
from spottrain.varuna_manager.pool.store.journal import PoolJournal
from spottrain.varuna_manager.pool.store.settings import settings_of, supplies_of


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolLoop]:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path))
    config = parse_pool({"name": "lab", "max_vms": 4}, "lab.yaml")
    pool = create_pool(config)
    state = PoolState(
        settings=settings_of(config), supplies=supplies_of(config, {"local/cpu": 1.0})
    )
    with closing(PoolJournal(pool.journal)) as journal:
        journal.append(None, PoolStarted(at_s=0.0), state)
        yield PoolLoop(pool, journal, state)


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
    loop: PoolLoop, given: dict[str, Any], code: int, words: str
) -> None:
    assert loop.submit(request(name="first"), {}) == {"job": "first", "starts": True}
    with pytest.raises(SpottrainError, match=words) as refused:
        loop.submit(request(**given), {})
    assert refused.value.exit_code == code
    assert list(loop.state.jobs) == ["first"], "what is refused leaves nothing"


def write_job(*ends: Any, pool: str = "lab") -> None:
    """Write the journal of a job of a pool."""
    folder = job_dir("job")
    folder.path.mkdir(parents=True)
    grant = PoolGrant(
        pool=pool,
        serial=0,
        vms=(("local/cpu", 2),),
        until_s=1e6,
        max_microusd=10**9,
    )
    asked = settings(grant=grant)
    with closing(Journal(folder.journal)) as journal:
        journal.append(JobSubmitted(at_s=1.0, settings=asked), *ends)


FAILED = CommandFailed(
    at_s=2.0, command="compute_plan", vm_ids=(), reason="no fleet could run it"
)


def end(loop: PoolLoop) -> None:
    loop.submit(request(), {})
    loop.feed(PoolJobEnded(at_s=loop.now_s(), job="job"))


def test_a_job_that_has_failed_goes_on_and_does_not_end_by_its_old_outcome(
    loop: PoolLoop,
) -> None:
    write_job(FAILED)
    assert end_of(job_dir("job")) == "failed"
    end(loop)
    loop.pause("job", is_paused=False)
    assert loop.state.jobs["job"].phase is PoolJobPhase.ACTIVE
    assert any(loop.state.jobs["job"].granted)
    seen = JobManagers("lab", loop.state.supplies).look(loop.state, math.inf, ["job"])
    assert not any(isinstance(event, PoolJobEnded) for event in seen)


def test_a_job_of_that_name_that_is_not_the_pools_is_left_alone(loop: PoolLoop) -> None:
    write_job(FAILED, pool="other")
    end(loop)
    with pytest.raises(SpottrainError, match="job job has ended"):
        loop.pause("job", is_paused=False)
    with pytest.raises(SpottrainError, match="has no job poet"):
        loop.pause("poet", is_paused=False)


class NotedJob(WatchedJob):
    """A job whose manager is not really started."""

    def start(self) -> None:
        pass


def test_a_manager_that_died_before_it_could_say_what_it_holds_is_started(
    loop: PoolLoop,
) -> None:
    rented = LaunchIntended(
        at_s=2.0, intent="i", token="t", offer=offer("a", 1.0), count=2
    )
    write_job(ManagerStarted(at_s=1.0, software_version="1", pid=1), rented)
    loop.submit(request(), {})
    unheard = replace(
        loop.state.jobs["job"], granted=(0,), held=(0,), may_hold=(2,), may_until_s=1e9
    )
    job = NotedJob(folder=job_dir("job"), throughputs=JobThroughputs(()))
    managers = JobManagers("lab", loop.state.supplies, lambda _: job)
    starts = []
    for may_hold in ((0,), (2,)):
        managers.look(loop.state.with_job(replace(unheard, may_hold=may_hold)), 1e3)
        starts.append(job.starts)
    assert starts == [0, 1]
