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
    folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(given.casefold(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else ""


def did_you_mean(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``did you mean NAME?`` for the ``nearest`` name; empty if none is near."""
    name = nearest(given, known, cutoff=cutoff)
    return f"did you mean {name}?" if name else ""
