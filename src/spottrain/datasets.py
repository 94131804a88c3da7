"""Paths of the job file's data, for the user's code; standard library only."""

from __future__ import annotations

import os
from pathlib import Path

from spottrain.errors import UserCodeError

_PREFIX = "SPOTTRAIN_DATA_"


def variable(name: str) -> str:
    """Return the environment variable that leads to a dataset of the job file."""
    return f"{_PREFIX}{name.upper()}"


def data_path(name: str) -> Path:
    """Return where a dataset of the job file's ``data:`` lies on this machine.

    Args:
        name: As in the job file.

    Returns:
        A folder; for a single object that was not unpacked, a file.

    Raises:
        UserCodeError: This machine does not have it.
    """
    found = os.environ.get(variable(name))
    if found:
        return Path(found)
    known = sorted(x.removeprefix(_PREFIX).lower() for x in os.environ if _is_data(x))
    raise UserCodeError(
        f"data {name}: is not on this machine, which has {', '.join(known) or 'none'}; "
        f"name it under data: in the job file, give it a sample: there if it is large, "
        f"or set {variable(name)} to a path"
    )


def _is_data(variable: str) -> bool:
    return variable.startswith(_PREFIX)
