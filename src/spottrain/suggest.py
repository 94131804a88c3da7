"""The nearest known name, for errors about a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


def near(given: str, known: Iterable[str], cutoff: float) -> list[str]:
    """Return the known names that are all most like a given one, sorted; none if none is near.

    Args:
        given: What somebody wrote; case does not count.
        known: The names.
        cutoff: Least likeness, from 0 to 1.
    """
    wanted = given.casefold()
    likeness = {name: SequenceMatcher(a=name.casefold(), b=wanted).ratio() for name in known}
    best = max(likeness.values(), default=0.0)
    return sorted(name for name, each in likeness.items() if each == best >= cutoff)


def did_you_mean(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``did you mean NAME?`` for the nearest names, several if they are equally near;
    empty if none is near."""
    return f"did you mean {' or '.join(names)}?" if (names := near(given, known, cutoff)) else ""
