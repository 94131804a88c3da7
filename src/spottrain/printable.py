"""Makes text from elsewhere safe to store and to show; standard library only.

VMs, their clouds and users' code write it: a terminal would obey what it contains, and
most writers refuse what is not Unicode.
"""

from __future__ import annotations

import re
from typing import Any

_SEQUENCES = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # colours, movements of the cursor
    r"|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # titles, links, the clipboard
    r"|[ -/]*[0-~]"
    r")?"
)
"""What terminals obey, from the escape character on (ECMA-48)."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters but tabs and line ends, and lone surrogates."""


def printable(text: str) -> str:
    """Return ``text`` without what terminals obey, and with other control characters and
    lone surrogates as escapes, such as ``\\x07``."""
    text = _SEQUENCES.sub("", text)
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def printable_data(data: Any) -> Any:
    """Return parsed JSON with each of its texts ``printable``."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, list):
        return [printable_data(one) for one in data]
    if isinstance(data, dict):
        return {key: printable_data(one) for key, one in data.items()}
    return data
