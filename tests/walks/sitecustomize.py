"""Notes which of our modules' functions run, in each process that has this folder on its path.

Python imports a module of this name as it starts. Functions that run while a module is
imported are not noted, nor are processes and threads that something else than Python starts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import CodeType, FrameType

LOG = os.environ["WALK_LOG"]
SOURCES = os.environ["WALK_SOURCES"]
MARKS = frozenset(os.environ["WALK_MARKS"].split())
KEY = os.environ["WALK_KEY"]
PERIOD_S = 0.02
"""A module is noted once within it, and anew after each mark."""

_known: dict[int, tuple[CodeType, str, str, bool]] = {}
"""Of each code object's id: itself (so that the id stays its own), its module, the mark
that it is, and whether it names the key."""
_noted_s: dict[str, float] = {}


def _is_import(frame: FrameType | None) -> bool:
    """Return whether a frame is the body of a module that is imported, or of a class."""
    if frame is None or frame.f_code.co_flags & 0x2:  # CO_NEWLOCALS: a function has it
        return False
    return frame.f_globals.get("__name__") != "__main__"


def _look_up(frame: FrameType) -> tuple[CodeType, str, str, bool]:
    code, names = frame.f_code, frame.f_globals
    module = names["__spec__"].name if names["__name__"] == "__main__" else names["__name__"]
    mark = f"{module}.{code.co_qualname}"
    given = [
        name for constant in code.co_consts if isinstance(constant, tuple) for name in constant
    ]
    names_key = KEY in (*code.co_names, *code.co_varnames, *given)
    return code, module, mark if mark in MARKS else "", names_key


def _note(now_s: float, kind: str, what: str) -> None:
    # Opened each time: forks close files that they do not know.
    with open(LOG, "a") as log:
        log.write(f"{now_s:.6f} {os.getpid()} {kind} {what}\n")


def _called(frame: FrameType, event: str, argument: object) -> None:
    code = frame.f_code
    if not code.co_filename.startswith(SOURCES) or not code.co_flags & 0x2:
        return
    if _is_import(frame.f_back):
        return
    known = _known.get(id(code))
    if known is None:
        known = _known[id(code)] = _look_up(frame)
        if known[3]:
            _note(time.time(), "key", known[1])
    _, module, mark, _ = known
    now_s = time.time()
    if mark:
        _noted_s.clear()
        _note(now_s, "mark", mark)
    if now_s - _noted_s.get(module, 0.0) > PERIOD_S:
        _noted_s[module] = now_s
        _note(now_s, "ran", module)


threading.settrace(_called)
sys.settrace(_called)
