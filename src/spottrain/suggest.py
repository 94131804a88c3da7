"""The nearest known name, for errors about a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def did_you_mean(
    given: str, known: Iterable[str] | Mapping[str, str], *, cutoff: float = 0.6
) -> str:
    """Return ``did you mean NAME?`` for the nearest known name; empty if none is near.

    Args:
        given: What somebody wrote; case does not count.
        known: The names, or what is shown for each of them.
        cutoff: Least similarity, from 0 to 1.
    """
    shown = known if isinstance(known, Mapping) else {name: name for name in known}
    folded = {name.casefold(): text for name, text in shown.items()}
    near = difflib.get_close_matches(given.casefold(), folded, n=1, cutoff=cutoff)
    return f"did you mean {folded[near[0]]}?" if near else ""
