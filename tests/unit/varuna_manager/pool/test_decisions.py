"""Laws of a pool's decisions: whole VMs within every cap, for any jobs under any policy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import costly

from spottrain.pricing.sharing.policies import POLICIES
from spottrain.varuna_manager.pool.core.decide import decided
from spottrain.varuna_manager.pool.core.grants import regrant
from spottrain.varuna_manager.pool.core.model import (
    HoldingsReported,
    JobRequest,
    JobRequested,
    Limits,
    PoolJob,
    PoolSettings,
    PoolState,
    PoolTimerFired,
    PriorityChanged,
    Supply,
    Team,
)
from spottrain.varuna_manager.pool.core.step import step

caps = st.builds(
    Limits,
    max_vms=st.sampled_from([2.0, 5.0, math.inf]),
    max_microusd_per_hour=st.sampled_from([3e6, 8e6, math.inf]),
)


@st.composite
def requests(draw: st.DrawFn, kinds: int) -> JobRequest:
    smallest = draw(st.sampled_from([1, 1, 2]))
    largest = smallest + draw(st.integers(0, 4))
    power = draw(st.sampled_from([0.6, 1.0, 1.2]))
    speeds = [draw(st.sampled_from([0.0, 1.0, 3.0])) for _ in range(kinds)]
    speeds[0] = speeds[0] or 1.0
    return JobRequest(
        name="",
        throughputs=tuple(
            tuple((n, s * n**power) for n in range(smallest, largest + 1)) if s else ()
            for s in speeds
        ),
        examples=draw(st.sampled_from([100.0, 5000.0])),
        team=draw(st.sampled_from(["a", "b"])),
        weight=draw(st.sampled_from([1.0, 5.0])),
        deadline_s=draw(st.sampled_from([math.inf, math.inf, 3000.0, 20000.0])),
        limits=draw(caps),
    )


@st.composite
def pools(draw: st.DrawFn) -> tuple[PoolState, list[JobRequest]]:
    vms = draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    supplies = tuple(
        Supply(name=f"k{k}", vms=n, microusd_per_hour=(k + 1) * 1_000_000)
        for k, n in enumerate(vms)
    )
    teams = {name: Team(weight=w, limits=draw(caps)) for name, w in (("a", 1), ("b", 2))}
    jobs = draw(st.lists(requests(len(vms)), min_size=1, max_size=6))
    return PoolState(
        settings=PoolSettings(limits=draw(caps), teams=teams, silent_s=math.inf),
        supplies=supplies,
    ), jobs


@pytest.mark.parametrize("policy", POLICIES)
@costly
@given(pools())
def test_targets_and_grants_are_within_every_cap(
    policy: str, pool: tuple[PoolState, list[JobRequest]]
) -> None:
    state, jobs = pool
    settings_ = replace(state.settings, policy=policy)
    state = replace(state, settings=settings_)
    for m, request in enumerate(jobs):
        named = replace(request, name=f"j{m}")
        state, _ = step(state, JobRequested(at_s=100.0 * m, request=named))
    state, _ = step(state, PoolTimerFired(at_s=100.0 * len(jobs)))
    found = list(state.jobs.values())
    for vms in ("target", "granted", "held_upper_bound"):
        for k, supply in enumerate(state.supplies):
            assert sum(getattr(job, vms)[k] for job in found) <= supply.vms
        groups = [(settings_.limits, found)]
        for name, team in settings_.teams.items():
            members = [job for job in found if job.request.team == name]
            groups.append((team.limits, members))
        groups += [(job.request.limits, [job]) for job in found]
        for limits, members in groups:
            held = [getattr(job, vms) for job in members]
            assert sum(map(sum, held)) <= limits.max_vms
            per_hour = sum(map(state.microusd_per_hour, held))
            assert per_hour <= limits.max_microusd_per_hour
    for job in found:
        assert job.rate(job.target) > 0 or not any(job.target)


def test_who_waited_for_its_share_for_a_round_gets_enough_vms_for_it() -> None:
    """Three of 8 VMs are too few for its share, and what a turn of 4 leaves another has."""
    small = ((1, 0.17), (2, 0.33), (3, 0.44), (4, 0.65))
    tables = {"short": small, "turn": ((4, 0.52), (6, 0.63)), "other": small}
    now_s, none = 10_000.0, (0, 0)
    jobs = {
        name: PoolJob(
            request=JobRequest(
                name=name,
                throughputs=(table, table),
                examples=1e6,
                weight={"short": 10.0, "turn": 5.0, "other": 1.0}[name],
            ),
            arrived_s=0.0,
            heard_s=now_s,
            target=none,
            granted=none,
            held_upper_bound=none,
            held=none,
            entitled_s=2000.0,
            received_s=1000.0 if name == "turn" else 1500.0,
        )
        for name, table in tables.items()
    }
    held = {"short": (3, 0), "turn": (0, 4), "other": (1, 0)}
    for name, vms in held.items():
        more = replace(jobs[name], target=vms, granted=vms, held_upper_bound=vms, held=vms)
        jobs[name] = replace(more, target_rate=0.6 if name == "short" else 0.1)
    state = PoolState(
        settings=PoolSettings(limits=Limits(max_vms=8)),
        supplies=(
            Supply(name="a", vms=6, microusd_per_hour=1_000_000),
            Supply(name="b", vms=4, microusd_per_hour=1_000_000),
        ),
        jobs=jobs,
        now_s=now_s,
        decided_s=now_s - 1000.0,
    )

    def vms_of(short_since_s: float) -> int:
        short = replace(jobs["short"], short_since_s=short_since_s)
        return sum(decided(state.with_job(short)).jobs["short"].target)

    assert vms_of(short_since_s=now_s - 300.0) == 3
    assert vms_of(short_since_s=now_s - 400.0) == 4


@pytest.mark.parametrize("holds", [True, False])
def test_a_job_that_goes_to_another_kind_does_not_begin_anew(holds: bool) -> None:
    """Meanwhile it is granted nothing; one that holds nothing begins."""
    none = (0, 0)
    job = PoolJob(
        request=JobRequest(name="j", throughputs=(((1, 1.0),), ((1, 1.0), (2, 2.0))), examples=1e6),
        arrived_s=0.0,
        heard_s=1000.0,
        target=(1, 0),
        granted=none,
        held_upper_bound=none,
        held=(0, 2) if holds else none,
        began_s=900.0,
    )
    supplies = tuple(Supply(name=name, vms=4, microusd_per_hour=1_000_000) for name in "ab")
    state = PoolState(settings=PoolSettings(), supplies=supplies, jobs={"j": job}, now_s=1000.0)
    after = regrant(state)[0].jobs["j"]
    assert after.granted == (1, 0)
    assert after.began_s == (900.0 if holds else 1000.0)


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_a_new_priority_moves_vms_although_no_more_is_trained_by_it(policy: str) -> None:
    state = PoolState(
        settings=PoolSettings(policy=policy),
        supplies=(Supply(name="k", vms=4, microusd_per_hour=1_000_000),),
    )
    for m, name in enumerate(("first", "second")):
        job = JobRequest(
            name=name, throughputs=(tuple((n, float(n)) for n in (1, 2, 3, 4)),), examples=1e9
        )
        state, _ = step(state, JobRequested(at_s=float(m), request=job))
        first = state.jobs["first"]
        obeyed = HoldingsReported(
            at_s=float(m),
            job="first",
            serial=first.serial,
            held=first.granted,
            spent=0,
            examples_done=0.0,
        )
        state, _ = step(state, obeyed)
    assert [job.target for job in state.jobs.values()] == [(2,), (2,)]
    state, _ = step(state, PriorityChanged(at_s=60.0, job="first", weight=99.0))
    assert [job.target for job in state.jobs.values()] == [(3,), (1,)]
