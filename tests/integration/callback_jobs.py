"""Callbacks of a job: what they are told goes to files in the folder ``TOLD``."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from spottrain import Callbacks, Snapshot, TrainingJob

if TYPE_CHECKING:
    from tests.integration import tiny_job
else:
    import tiny_job


def _tell(name: str, snapshot: Snapshot) -> None:
    told = dataclasses.asdict(snapshot) | {"folder": None}
    if snapshot.folder is not None:
        model = tiny_job.Tiny()
        model.load_state_dict(load_file(snapshot.folder / "model.safetensors"))
        told["folder"] = sorted(path.name for path in snapshot.folder.iterdir())
    with open(Path(os.environ["TOLD"], name), "a") as file:
        file.write(json.dumps(told) + "\n")


def evaluated(snapshot: Snapshot) -> None:
    _tell("on_evaluate", snapshot)
    sys.stdout.write(f"evaluated step {snapshot.step}\n")


def checkpointed(snapshot: Snapshot) -> None:
    _tell("on_checkpoint", snapshot)


def best(snapshot: Snapshot) -> None:
    _tell("on_best", snapshot)
    raise ValueError("the Hub does not answer")


def ended(snapshot: Snapshot) -> None:
    _tell("on_end", snapshot)


def hangs(snapshot: Snapshot) -> None:
    threading.Event().wait()


def fills(snapshot: Snapshot) -> None:
    """Fill the disk, or as much of it as the process may: nothing else ends it."""
    with open("filling", "wb") as file:
        while True:
            file.write(bytes(1 << 20))


def dies(snapshot: Snapshot) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def job() -> TrainingJob:
    callbacks = Callbacks(
        on_evaluate=evaluated, on_checkpoint=checkpointed, on_best=best, on_end=ended
    )
    return dataclasses.replace(tiny_job.paced_job(), callbacks=callbacks)


def hanging_job() -> TrainingJob:
    return dataclasses.replace(tiny_job.job(), callbacks=Callbacks(on_evaluate=hangs))


def filling_job() -> TrainingJob:
    return dataclasses.replace(tiny_job.job(), callbacks=Callbacks(on_evaluate=fills))


def dying_job() -> TrainingJob:
    return dataclasses.replace(tiny_job.job(), callbacks=Callbacks(on_evaluate=dies))
