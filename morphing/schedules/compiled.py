"""Compiles the loops of this package with numba, where that pays.

A loop is a function of numbers and arrays that runs as it is, slowly, or compiled.
numba takes a moment to import and, once after a change, seconds to compile, which does
not pay for little work. Machine code is kept in the user's cache folder, separately for
every version of the sources (numba itself checks the file of the loop only).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

WORTH_COMPILING = 3000
"""Number of tasks from which on importing numba pays."""
_jitables: list[Callable[..., Any]] = []
_compiled: dict[Callable[..., Any], Any] = {}


def jitable(function: F) -> F:
    """Declare a function that loops call, so that it is compiled with them."""
    _jitables.append(function)
    return function


def jitted(loop: F, tasks: int) -> F:
    """Return ``loop``, compiled if that was done before or pays for so many tasks."""
    if _compiled.get(loop) is None:
        if tasks < WORTH_COMPILING and not _compiled:
            return loop
        _compiled[loop] = _compile(loop)
    machine: F = _compiled[loop]
    return machine


def run_loop(loop: Callable[..., Any], tasks: int, *numbers: Any, **records: Any) -> Any:
    """Run ``loop`` and return what it does, compiled if that pays for so many tasks.

    Where it runs as it is, arrays among ``numbers`` are lists, in which Python finds single
    numbers several times as fast. What is written to ``records`` is seen by the caller.
    """
    machine = jitted(loop, tasks)
    return machine(*(_as_lists(numbers) if machine is loop else numbers), **records)


def _as_lists(numbers: Any) -> Any:
    if isinstance(numbers, tuple):
        return tuple(map(_as_lists, numbers))
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


def _compile(loop: F) -> Any:
    # Late: commands and workers that simulate nothing never load it, and a machine that
    # only trains need not have it.
    try:
        import numba
    except ImportError:
        return loop
    from numba.extending import register_jitable

    for function in _jitables:
        register_jitable(function)
    _jitables.clear()
    config: Any = numba.config
    usual = config.CACHE_DIR
    config.CACHE_DIR = usual or str(_cache_dir())
    try:
        return numba.njit(loop, cache=True)
    except RuntimeError:  # no folder can be written
        return numba.njit(loop)
    finally:
        config.CACHE_DIR = usual


def _cache_dir() -> Path:
    """Return the folder for machine code of these very sources."""
    import platformdirs

    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return platformdirs.user_cache_path("spottrain") / "compiled" / digest.hexdigest()
