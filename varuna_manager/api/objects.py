"""A ``TrainingJob`` that was made in Python, such as in a notebook, as a work folder.

What is defined in ``__main__`` is pickled by value (cloudpickle), what is in modules by
name. The folder holds the pickle, cloudpickle itself, which VMs need not have, and the
files of the user's that go along.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from spottrain.errors import UserCodeError, shortened
from spottrain.eventlog.folder import home
from spottrain.pickled import FILE, python_version
from spottrain.varuna_manager.api.actions import Say
from spottrain.varuna_manager.config.ignore import IGNORE_FILE
from spottrain.varuna_manager.launch.workdir import survey

_RULES = frozenset({IGNORE_FILE, ".gitignore"})
_MAX_DEPTH = 8
"""Steps from a ``TrainingJob`` to what cannot be pickled, at most."""


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Refuses open files, of which cloudpickle would send what is in them."""

    def reducer_override(self, value: object) -> Any:
        """Return how to pickle a value."""
        if isinstance(value, io.TextIOWrapper):
            raise pickle.PicklingError("it is an open file")
        return super().reducer_override(value)


def is_training_job(value: object) -> bool:
    """Return whether a value is a ``TrainingJob``; never imports torch."""
    module = sys.modules.get("spottrain.pipeline.model.job")
    return module is not None and isinstance(value, module.TrainingJob)


@contextlib.contextmanager
def work_folder(training_job: object, files: Path | None, say: Say) -> Iterator[Path]:
    """Yield a folder from which a ``TrainingJob`` can be launched; removed afterwards.

    Args:
        training_job: The object.
        files: A folder whose files go along, as those of a job file's ``workdir``.
        say: Called with what goes along.

    Raises:
        UserCodeError: Something of it cannot be pickled; says what.
        ConfigError: The files are too many, or cannot be read.
        OSError: The state directory cannot be written.
    """
    data = pickled(training_job)
    scratch = home() / "cache" / "objects"
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        if files is not None:
            sent = survey(files)
            for line in sent.lines():
                say(line)
            for path in sent.sizes:
                if path.name not in _RULES:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(files / path, folder / path, follow_symlinks=False)
        ours = Path(cloudpickle.__file__).parent
        shutil.copytree(
            ours,
            folder / ours.name,
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
        (folder / FILE).write_bytes(f"{python_version()}\n".encode() + data)
        # All that is here goes along, whatever Git ignores.
        (folder / IGNORE_FILE).write_text("!*\n")
        yield folder


def pickled(training_job: object) -> bytes:
    """Return a ``TrainingJob`` as bytes, with what ``__main__`` defines.

    Raises:
        UserCodeError: Something of it cannot be pickled; says what.
    """
    data, reason = _try(training_job)
    if data is None:
        where, culprit = _culprit(training_job, "TrainingJob", 0)
        raise UserCodeError(
            f"{where} cannot be sent to VMs: got {shortened(culprit)}: {reason}; make it where it "
            "is used, such as in __getitem__ or in the function"
        )
    return data


def _try(value: object) -> tuple[bytes | None, str]:
    """Return a value's pickle, or None and why there is none."""
    out = io.BytesIO()
    try:
        _Pickler(out).dump(value)
    except Exception as error:  # noqa: BLE001 - whatever objects of the user's raise
        return None, (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return out.getvalue(), ""


def _culprit(value: object, where: str, depth: int) -> tuple[str, object]:
    """Return where in a value, which cannot be pickled, the innermost part is that cannot."""
    for name, part in _parts(value) if depth < _MAX_DEPTH else ():
        if _try(part)[0] is None:
            return _culprit(part, name if depth == 0 else f"{where}: {name}", depth + 1)
    return where, value


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield what pickling a value comes to, by the names that people gave it."""
    match value:
        case type() | ModuleType():
            return
        case Mapping():
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{index}]", part) for index, part in enumerate(value))
        case FunctionType():
            names = inspect.getclosurevars(value)
            yield from names.nonlocals.items()
            yield from names.globals.items()
            yield from (("default", part) for part in value.__defaults__ or ())
        case _ if is_dataclass(value):
            yield from ((one.name, getattr(value, one.name)) for one in fields(value))
        case _:
            yield from vars(value).items() if hasattr(value, "__dict__") else ()
            yield from (
                (name, part)
                for name in ("func", "__self__", "__func__")
                if (part := getattr(value, name, None))
            )
