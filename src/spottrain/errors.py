"""The root of every error that spottrain raises on purpose.

SpottrainError
├── ConfigError            the user's job file or command line is wrong        exit 2
├── UserCodeError          the user's own code is missing, raised or misfits   exit 3
├── BudgetError            budget or deadline cannot be met                    exit 4
├── CapacityError          no cloud has what the job needs                     exit 5
├── WireError              a message or a file is not what its schema says     exit 1
├── CheckpointError        (manifest.py) a checkpoint is damaged or unwritable exit 1
└── CloudError             (cloud/port/errors.py) a cloud said no                   exit 6

A message is one line: what, got what, what to do. What caused an error stays its
``__cause__``, down to what an SDK or the operating system said.
"""

from __future__ import annotations

from collections.abc import Iterator

from spottrain.redaction import redacted

_SHOWN = 60
"""Characters of what somebody gave that an error shows."""


def shortened(given: object) -> str:
    """Return ``repr`` of what an error complains about, cut: it may be a whole file."""
    shown = given if isinstance(given, str) else repr(given)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return repr(shown) if isinstance(given, str) else shown


def one_line(said: object) -> str:
    """Return what somebody said as one line."""
    return " ".join(str(said).split())


class SpottrainError(Exception):
    """Something the user can act on; the CLI prints it as one line."""

    exit_code = 1


class ConfigError(SpottrainError):
    """The job file or the command line is wrong."""

    exit_code = 2


class UserCodeError(SpottrainError):
    """The user's own code is missing, raised, or returned the wrong thing.

    Args:
        message: One line for the user.
        traceback: The user's traceback, shown as it is, if there is one.
    """

    exit_code = 3

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class BudgetError(SpottrainError):
    """The budget or the deadline cannot be met."""

    exit_code = 4


class CapacityError(SpottrainError):
    """No offer has the capacity that the job needs."""

    exit_code = 5


class WireError(SpottrainError):
    """A message or a file does not fit its schema."""


def causes(error: BaseException) -> Iterator[str]:
    """Yield what caused an error, one line each, the nearest cause first.

    Causes in another process are notes of the error that came from there.
    """
    at: BaseException | None = error
    seen = []  # an error that is raised from itself, or from what it has caused, ends it
    while at is not None and at not in seen:
        seen.append(at)
        yield from getattr(at, "__notes__", ())
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
        if at is not None and at not in seen:
            kind = type(at)
            module = kind.__module__
            ours = module == "builtins" or module.startswith("spottrain.")
            name = kind.__name__ if ours else f"{kind.__module__}.{kind.__name__}"
            yield redacted(one_line(f"caused by: {name}: {at}"))
