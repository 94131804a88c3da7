"""Types that schedules and simulations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.int64]
Run: TypeAlias = tuple[bytes, int]
"""Codes of a pattern, and the number of its repetitions. A code is 3 times the chunk plus
the work."""
Runs: TypeAlias = Sequence[Run]
"""A stage's list; no pattern of it is empty, and each is repeated at least once."""
