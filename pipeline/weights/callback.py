"""``python -m spottrain.pipeline.weights.callback``: calls a function of the user's once.

It runs in a child of the process that follows the job, with an exported copy of the weights,
in a folder that goes away: relative and temporary files of the function are in it, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from spottrain.errors import SpottrainError
from spottrain.pipeline.model.entrypoint import load_job, user_code
from spottrain.pipeline.model.inspect import answer
from spottrain.pipeline.model.job import CallbackInfo
from spottrain.pipeline.weights.export import export
from spottrain.storage.open import open_store
from spottrain.units import counted

RESERVE_BYTES = 1 << 30
"""What a function must leave free on the disk, which the manager's journal is on, too."""
_LOOK_S = 0.1


def _watch_disk(name: str, folder: Path, reserve_bytes: int) -> None:
    """End this process as soon as less than ``reserve_bytes`` are free."""
    while shutil.disk_usage(folder).free >= reserve_bytes:
        time.sleep(_LOOK_S)
    # Not as the function's own error: it may be in the middle of a long write.
    os.write(2, f"\n{_too_full(name, folder, reserve_bytes)}\n".encode())
    os._exit(SpottrainError.exit_code)


def _too_full(name: str, folder: Path, reserve_bytes: int) -> str:
    mebibytes = counted(reserve_bytes >> 20, "MiB", "MiB")
    return f"{name} is not called while {folder} has less than {mebibytes} free; free some"


def main(arguments: list[str] | None = None) -> int:
    """Call the function; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spottrain.pipeline.weights.callback")
    parser.add_argument("entrypoint", help="module:function")
    parser.add_argument("workdir", type=Path)
    parser.add_argument("name", help="of the function, such as on_best")
    parser.add_argument("info", help="what it is told, as JSON")
    parser.add_argument("scratch", type=Path, help="a folder that goes away")
    parser.add_argument("log", type=Path, help="what it prints goes there")
    parser.add_argument("--store", default="", help="folder or URL of the checkpoints")
    parser.add_argument("--checkpoint", default="", help="name of one of them")
    parser.add_argument("--reserve", type=int, default=RESERVE_BYTES, help="bytes to leave free")
    chosen = parser.parse_args(arguments)
    name, scratch = chosen.name, chosen.scratch.resolve()

    def run() -> dict[str, str]:
        if shutil.disk_usage(scratch).free < chosen.reserve:
            raise SpottrainError(_too_full(name, scratch, chosen.reserve))
        watch = name, scratch, chosen.reserve
        threading.Thread(target=_watch_disk, args=watch, daemon=True).start()
        os.dup2(os.open(chosen.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), 1)
        temporary = scratch / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        os.chdir(chosen.workdir)
        job = load_job(chosen.entrypoint, Path.cwd())
        info = CallbackInfo(**json.loads(chosen.info))
        if chosen.checkpoint:
            folder = scratch / "weights"
            folder.mkdir()
            export(job, open_store(chosen.store), chosen.checkpoint, "safetensors", folder)
            info = dataclasses.replace(info, folder=folder)
        with user_code(name):
            job.callbacks.asked[name](info)
        sys.stdout.flush()
        return {}

    return answer(run)


if __name__ == "__main__":
    sys.exit(main())
