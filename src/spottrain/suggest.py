"""The nearest known name, for errors about a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known name that is most like a given one; empty if none is near.

    Args:
        given: What somebody wrote; case does not count.
        known: The names.
        cutoff: Least similarity, from 0 to 1.
    """
    return next(iter(near(given, known, cutoff)), "")


def near(given: str, known: Iterable[str], cutoff: float) -> list[str]:
    """Return the known names that are all most like a given one, in their order."""
    wanted, names = given.casefold(), list(known)
    close = difflib.get_close_matches(
        wanted, [name.casefold() for name in names], n=len(names) or 1, cutoff=cutoff
    )
    matcher = difflib.SequenceMatcher(b=wanted)

    def likeness(name: str) -> float:
        matcher.set_seq1(name.casefold())
        return matcher.ratio()

    best = max(map(likeness, close), default=0.0)
    return [name for name in names if close and likeness(name) == best]


def did_you_mean(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``did you mean NAME?`` for the nearest names, several if they are equally near;
    empty if none is near."""
    return f"did you mean {' or '.join(names)}?" if (names := near(given, known, cutoff)) else ""
