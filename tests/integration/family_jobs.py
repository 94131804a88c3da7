"""Jobs of the families of models, as ``family_jobs:row_0``, ``row_1``, …"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from spottrain import TrainingJob

if TYPE_CHECKING:
    from tests import families
else:
    sys.path.append(str(Path(__file__).parents[2]))
    families = importlib.import_module("tests.families")

ROWS = [*families.FAMILIES]


def entrypoint(name: str) -> str:
    """Return the entrypoint of a family's job."""
    return f"family_jobs:row_{ROWS.index(name)}"


def __getattr__(name: str) -> Callable[[], TrainingJob]:
    kind, _, number = name.partition("_")
    if kind != "row":
        raise AttributeError(name)
    return families.FAMILIES[ROWS[int(number)]].job
