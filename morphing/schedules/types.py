"""Types of what the loops work on."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.int64]
Codes: TypeAlias = NDArray[np.int8]
