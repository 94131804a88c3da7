"""Takes secrets out of what is logged, reported or shown.

Standard library only: agents and workers use it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

HIDDEN = "***"
VARIABLE = "SPOTTRAIN_SECRETS"
"""Environment variable: the names of those that hold secrets, which child processes
inherit with them."""
_MIN_CHARACTERS = 4
"""Shorter values are in many words."""
_CREDENTIALS = re.compile(
    r"(?P<before>"
    r"authorization['\"]?\s*[:=]\s*['\"]?(?:\w+ +)?"
    r"|\bbearer +(?=\S{8})"
    r"|[?&;](?:x-(?:amz|goog)-[a-z-]*|[a-z_-]*(?:sig|signature|token|secret|password|key))="
    r")[^\s'\"&,;)>\]}]+",
    re.IGNORECASE,
)
"""As libraries print requests: headers, and what a URL is signed with."""
_LOGIN = re.compile(r"(?P<before>https?://|://[^\s/@:]*:)[^\s/@]+@", re.IGNORECASE)
"""Of a URL."""
_values: set[str] = set()


def hide(names: Iterable[str], *values: str) -> None:
    """Hide the values of environment variables, and further values, from now on."""
    known = {*filter(None, os.environ.get(VARIABLE, "").split(",")), *names}
    os.environ[VARIABLE] = ",".join(sorted(known))
    _values.update(values)


def redacted(text: str) -> str:
    """Return ``text`` without secrets, and without credentials of whatever origin."""
    for value in sorted(set(_hidden()), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _LOGIN.sub(rf"\g<before>{HIDDEN}@", text)
    return _CREDENTIALS.sub(rf"\g<before>{HIDDEN}", text)


def _hidden() -> Iterator[str]:
    """Yield what must not be shown: of values of several lines each line, as logs are."""
    names = os.environ.get(VARIABLE, "").split(",")
    for value in (*_values, *(os.environ.get(name, "") for name in names)):
        for line in (value, *value.splitlines()):
            if len(line.strip()) >= _MIN_CHARACTERS:
                yield line.strip()
