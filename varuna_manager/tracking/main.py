"""Writes a job's measurements to one sink: ``… tracking.main <job_dir> <sink>``.

The manager starts one such process for each sink. It reads the job's file, so nobody waits
for it, and it may be killed at any time: the next one goes on from what it has written.
When its stdin is closed it writes what is left, and ends. A line on stdout says what is in
the way of writing; an empty one that nothing is any more.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from spottrain.errors import one_line
from spottrain.files import locked
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.measurements import Cursor, Measurements
from spottrain.varuna_manager.tracking.about import describe
from spottrain.varuna_manager.tracking.sinks import (
    LINES,
    JsonLines,
    Mlflow,
    Sink,
    TensorBoard,
    Wandb,
)

POLL_S = 1.0
"""Between two looks for new measurements."""
NICENESS = 10
"""Training and the manager come first."""
_BUSY_S = 10.0


def open_sink(job: Path, name: str, uid: str) -> Sink:
    """Return a sink of the job in folder ``job``; ``uid`` is the job's."""
    config: dict[str, Any] = json.loads((job / "config.json").read_bytes())
    notes = job / "tracking"
    note = notes / f"{name}.json"
    match name:
        case "tensorboard":
            return TensorBoard(job / "tensorboard", note)
        case "wandb":
            run = describe(JobDir(job), uid, config)
            return Wandb(config["track"]["wandb"], run, notes, note)
        case "mlflow":
            run = describe(JobDir(job), uid, config)
            return Mlflow(config["track"]["mlflow"], run, note)
        case _:
            place = config["checkpoint"]["path"]
            return JsonLines(job / LINES, notes / "lines.json", place, uid)


def follow(measurements: Measurements, sink: Sink, say: TextIO) -> None:
    """Write to a sink until stdin is closed and nothing is left."""
    cursor, reported, ends = sink.begin(), None, False
    while True:
        before, page = cursor, measurements.changes(cursor)
        if page.rows or page.rewound_to is not None:
            sink.take(page)
        cursor = Cursor(*page.cursor)
        if cursor != before:
            continue
        if (trouble := sink.idle(ends=ends)) != reported:
            reported = trouble
            say.write(one_line(trouble) + "\n")
            say.flush()
        if ends:
            return
        ends = bool(select.select([0], [], [], POLL_S)[0]) and not os.read(0, 4096)


def write(argv: Sequence[str], open_sink: Callable[[Path, str, str], Sink] = open_sink) -> int:
    """Write the measurements of the job in folder ``argv[0]``, whose id is ``argv[2]``, to
    sink ``argv[1]``, which ``open_sink`` opens."""
    job, name = Path(argv[0]).absolute(), argv[1]
    os.nice(NICENESS)
    # Stdout is for us: what libraries print goes to the log.
    say = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    (job / "tracking").mkdir(exist_ok=True)
    # The process of a manager before may still write what was left.
    with locked(job / "tracking" / f"{name}.lock"):
        sink = open_sink(job, name, argv[2])
        file = job / "measurements.sqlite"
        with closing(sink), closing(Measurements(file, read_only=True)) as measured:
            follow(measured, sink, say)
    return 0


if __name__ == "__main__":
    sys.exit(write(sys.argv[1:]))
