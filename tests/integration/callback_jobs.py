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

from spottrain import CallbackInfo, Callbacks, TrainingJob

if TYPE_CHECKING:
    from tests.integration import tiny_job
else:
    import tiny_job


def _tell(name: str, info: CallbackInfo) -> None:
    told = dataclasses.asdict(info) | {"folder": None}
    if info.folder is not None:
        model = tiny_job.Tiny()
        model.load_state_dict(load_file(info.folder / "model.safetensors"))
        told["folder"] = sorted(path.name for path in info.folder.iterdir())
    with open(Path(os.environ["TOLD"], name), "a") as file:
        file.write(json.dumps(told) + "\n")


def evaluated(info: CallbackInfo) -> None:
    _tell("on_evaluate", info)
    sys.stdout.write(f"evaluated step {info.step}\n")


def checkpointed(info: CallbackInfo) -> None:
    _tell("on_checkpoint", info)


def best(info: CallbackInfo) -> None:
    _tell("on_best", info)
    raise ValueError("the Hub does not answer")


def ended(info: CallbackInfo) -> None:
    _tell("on_end", info)


def hangs(info: CallbackInfo) -> None:
    threading.Event().wait()


def fills(info: CallbackInfo) -> None:
    """Fill the disk, or as much of it as the process may: nothing else ends it."""
    with open("filling", "wb") as file:
        while True:
            file.write(bytes(1 << 20))


def dies(info: CallbackInfo) -> None:
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
