"""Linear programs, by scipy's HiGHS."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from spottrain.errors import SpottrainError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Floats = NDArray[np.float64]
INTERIOR: Literal["highs-ipm"] = "highs-ipm"
"""Interior points first where one column or row touches all jobs, which slows the simplex."""
_INFEASIBLE, _LOST = 2, 4
"""Status of the solver; another method may succeed where one is lost in rounding."""


class NoSolverError(SpottrainError):
    """The package of the solver is not installed."""


def check_solver() -> None:
    """Check that linear programs can be solved here: scipy is larger than all the rest of a
    client, which does without it.

    Raises:
        NoSolverError: They cannot.
    """
    if find_spec("scipy") is None:
        raise NoSolverError("pools need scipy, which is not installed: pip install scipy")


class SolverError(SpottrainError):
    """The solver gave up: a bug, or numbers of too different size."""


def solve(
    objective: Floats,
    *,
    rows: csr_array,
    limits: Floats,
    equal: csr_array | None = None,
    method: Literal["highs", "highs-ipm"] = "highs",
) -> Any:
    """Minimise ``objective``; None where nothing satisfies the rows.

    Raises:
        SolverError: the solver could not tell.
    """
    from scipy.optimize import linprog

    solve: Any = linprog  # its stubs know no sparse matrices
    found = solve(
        objective,
        A_ub=rows,
        b_ub=limits,
        A_eq=equal,
        b_eq=None if equal is None else np.ones(equal.shape[0]),
        method=method,
    )
    if found.status == _LOST and method != INTERIOR:
        return solve(objective, rows=rows, limits=limits, equal=equal, method=INTERIOR)
    if found.status == _INFEASIBLE:
        return None
    if found.status:
        raise SolverError(
            f"the linear program was not solved: {found.message}; numbers of very "
            "different size are the usual cause: check throughputs and prices"
        )
    return found
