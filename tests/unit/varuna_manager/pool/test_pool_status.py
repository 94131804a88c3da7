"""What a pool's status says of a job that has fewer VMs than there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.builders import a_profile, microbatch_profile, section_profile
from tests.simulation.test_simulation import settings

from spottrain.varuna_manager.core.model.parts import PreparationState
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.pool.core.model import (
    JobRequest,
    Limits,
    PoolJob,
    PoolSettings,
    PoolState,
    Supply,
)
from spottrain.varuna_manager.pool.report.document import document

TABLE = ((1, 32.0), (2, 60.0))


def status_of(spread: float, measured_at_s: float) -> dict[str, object]:
    """Return the status of a job that has all that it is believed to use."""
    job = PoolJob(
        request=JobRequest(name="job", throughputs=(TABLE,), examples=1e6),
        arrived_s=0.0,
        heard_s=990.0,
        target=(2,),
        granted=(2,),
        held_upper_bound=(2,),
        held=(2,),
    )
    pool = PoolState(
        settings=PoolSettings(limits=Limits(max_vms=4)),
        supplies=(Supply(name="local/box", vms=4, microusd_per_hour=1),),
        jobs={"job": job},
        now_s=1000.0,
    )
    section = replace(section_profile(), forward_spread=spread, backward_spread=spread)
    state = State(
        phase=JobPhase.ACTIVE,
        settings=settings(),
        preparation=PreparationState(
            profile=a_profile(microbatch_profile([section])), profile_at_s=measured_at_s
        ),
    )
    found = document("lab", pool, {"job": state}, 1000.0, is_served=True)
    (told,) = found["jobs"]
    return dict(told)


@pytest.mark.parametrize(
    ("spread", "at_s", "expected"),
    [
        (0.0, 0.0, "more VMs would train it no faster, by its profile"),
        (0.0, 700.0, "more VMs would train it no faster, by its profile of 5 min 00 s ago"),
        (
            0.8,
            700.0,
            (
                "more VMs would train it no faster, by its profile of 5 min 00 s ago; the machine was "
                "busy: times vary by 80%, and predictions with them"
            ),
        ),
    ],
)
def test_it_says_what_is_not_tried_and_why(spread: float, at_s: float, expected: str) -> None:
    told = status_of(spread, at_s)
    assert told["why"] == expected
    assert told["believed"] == {
        "examples_per_s": {"local/box": {"1": 32.0, "2": 60.0}},
        "measured_at_s": at_s or None,
        "spread": spread,
    }
