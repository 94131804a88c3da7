from __future__ import annotations

from pathlib import Path

import pytest
from tests.once import alone, shared_folder

from spottrain.morphing.memory.loads import stage_loads
from spottrain.morphing.schedules.lists import compact_schedule
from spottrain.morphing.simulate.replica import (
    Conditions,
    Link,
    StageTimes,
    simulate_pipeline,
)

REPOSITORY = Path(__file__).resolve().parents[3]
DATA = REPOSITORY / "tests" / "data"


@pytest.fixture(scope="session")
def reference() -> Path:
    """Figures measured from the original Varuna programs."""
    return DATA / "reference"


@pytest.fixture(scope="session", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile what takes longest in one process; the others then read it from the disk."""
    with alone(shared_folder(tmp_path_factory) / "compiled.lock"):
        stage = StageTimes(forward_s=1.0, recompute_s=1.0, backward_s=1.0)
        schedule = compact_schedule("varuna", 2, 1000, recompute=True)
        for conditions in Conditions:
            simulate_pipeline(schedule, [stage] * 2, [Link()], conditions=conditions)
        stage_loads("varuna", 2, 1000, recompute=True)
