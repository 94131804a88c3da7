"""What measurements are written to: ``metrics.jsonl``, TensorBoard, W&B, MLflow.

A sink says where to read on, takes page after page, and has made a page durable when it
has taken it. ``metrics.jsonl`` and TensorBoard go back when training has. W&B and MLflow
keep the first value of every step: further ones are left out, and the next value is
accompanied by ``trained_again/from_step``. They also show the job's settings, the plan that
it trains with, and which checkpoint is the best.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from spottrain.files import write_whole
from spottrain.manifest import CheckpointError, own_uids
from spottrain.storage.open import open_store
from spottrain.storage.store import StorageError
from spottrain.varuna_manager.jobs.measurements import Cursor, Minibatch, Page, Row
from spottrain.varuna_manager.tracking.about import Best, BestCheckpoint, Run
from spottrain.varuna_manager.tracking.lines import as_line, position_of, scalars

LINES = "metrics.jsonl"
COPY_PAUSE_S = 60.0
"""Least time between two copies of ``metrics.jsonl`` to the store."""
COPY_SHARE = 0.02
"""Largest share of the time that is spent on copying."""
MLFLOW_BATCH = 1000
"""Metrics that MLflow takes in one request (REST API, ``runs/log-batch``)."""
MLFLOW_PARAMS, MLFLOW_CHARACTERS = 100, 6000
"""Parameters that it takes in one request, and characters of a value (REST API,
``runs/log-batch`` and ``runs/log-parameter``)."""
AGAIN = "trained_again/from_step"


class Sink(Protocol):
    """Something that measurements are written to, by one process at a time."""

    def begin(self) -> Cursor:
        """Return where to read on."""
        ...

    def take(self, page: Page) -> None:
        """Write a page; it is durable when this returns."""
        ...

    def idle(self, *, ends: bool) -> str:
        """Do what is due while there is nothing to write; return what is in the way.

        Args:
            ends: This is the last call before ``close``.
        """
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...


class JsonLines:
    """``metrics.jsonl``, a line for each row, and its copy in the checkpoint store.

    Args:
        note: Keeps how far rewrites have been taken into account.
        place: The store that the file is copied to; ``None``: nowhere.
        uid: Of the job whose store it must be; empty: anybody's.
    """

    def __init__(self, path: Path, note: Path, place: str | None, uid: str = "") -> None:
        self._path = path
        self._note = note
        self._place, self._uid = place, uid
        self._copied_bytes = -1
        self._copy_at_s = 0.0
        self._trouble = ""
        path.touch()

    def begin(self) -> Cursor:
        """Return where to read on: after the last line that is whole."""
        with open(self._path, "r+b") as file:
            end, line = next(_lines_from_end(file), (0, b""))
            try:
                last = position_of(line)
            except ValueError:
                file.truncate(0)
                return Cursor()
            file.truncate(end)
        return Cursor(int(_read(self._note).get("rewrite", 0)), last)

    def take(self, page: Page) -> None:
        """Write a page, over what it replaces."""
        with open(self._path, "r+b") as file:
            if page.rewound_to is not None:
                lines = _lines_from_end(file)
                kept = (end for end, line in lines if position_of(line) < page.rewound_to)
                file.truncate(next(kept, 0))
            file.seek(0, os.SEEK_END)
            file.write("".join(map(as_line, page.rows)).encode())
        self._copied_bytes = -1
        # After the lines: what is rewound twice comes out the same.
        write_whole(self._note, json.dumps({"rewrite": page.cursor.rewrite}))

    def idle(self, *, ends: bool) -> str:
        """Copy the file to the store if that is due; return why it cannot be copied."""
        num_bytes, now_s = self._path.stat().st_size, time.monotonic()
        is_due = num_bytes != self._copied_bytes and (ends or now_s >= self._copy_at_s)
        if self._place is not None and is_due:
            try:
                store = open_store(self._place)
                own_uids(store, self._uid)  # else it may be where a disk is to be mounted
                store.put(LINES, self._path)
                self._trouble, self._copied_bytes = "", num_bytes
            except StorageError as error:
                self._trouble = f"{LINES} is not copied: {error}"
            took_s = time.monotonic() - now_s
            self._copy_at_s = now_s + max(COPY_PAUSE_S, took_s / COPY_SHARE)
        return self._trouble

    def close(self) -> None:
        """Do nothing: no file stays open."""


@dataclass
class _Written:
    """What a sink that follows steps holds; kept in its note."""

    step: int = 0
    """The last mini-batch."""
    generation: int = 0
    """That trained it."""
    judged: dict[str, int] = field(default_factory=dict)
    """The last evaluation of each set."""
    again: int | None = None
    """First mini-batch that has been trained again since the last one was written."""

    def is_new(self, row: Row) -> bool:
        """Return whether a row comes after what is held; then it is held."""
        if isinstance(row, Minibatch):
            if row.step > self.step:
                self.step, self.generation = row.step, row.generation
                return True
            if row.generation > self.generation and self.again is None:
                self.again = row.step
            return False
        known = self.judged.get(row.name, -1)
        self.judged[row.name] = max(known, row.step)
        return row.step > known

    def first_values(self, page: Page) -> Iterator[tuple[Row, dict[str, float]]]:
        """Yield the new rows of a page and their numbers, with a mark where those of
        earlier steps are not the ones that were trained in the end."""
        for row in filter(self.is_new, page.rows):
            values = scalars(row)
            if self.again is not None and isinstance(row, Minibatch):
                values[AGAIN], self.again = float(self.again), None
            yield row, values

    def rewind(self, step: int) -> None:
        """Forget what was held from ``step`` on."""
        self.step = min(self.step, step - 1)
        self.judged = {name: min(at, step - 1) for name, at in self.judged.items()}


def _read_note(note: Path) -> tuple[Cursor, _Written]:
    """Return where a sink has to read on, and what it holds."""
    known = _read(note)
    cursor = Cursor(*known.pop("cursor", Cursor()))
    return cursor, _Written(**known)


def _write_note(note: Path, cursor: Cursor, written: _Written) -> None:
    write_whole(note, json.dumps({"cursor": cursor, **vars(written)}))


class TensorBoard:
    """Event files of TensorBoard; a restart at a step hides what came after it.

    ``SessionLog.START`` as in TensorBoard's ``event.proto``; see ``purge_step`` of
    ``torch.utils.tensorboard``.

    Args:
        folder: Of the event files.
        note: Keeps what has been written.
    """

    def __init__(self, folder: Path, note: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder))
        self._note = note
        self._written = _Written()

    def begin(self) -> Cursor:
        """Return where to read on; what was written after the note is hidden."""
        cursor, self._written = _read_note(self._note)
        if self._written.step:
            self._restart(self._written.step + 1)
        return cursor

    def take(self, page: Page) -> None:
        """Write a page, after a restart if it goes back."""
        if page.rewound_to is not None:
            step = (page.rewound_to + 1) // 2
            self._written.rewind(step)
            self._restart(step)
        for row in filter(self._written.is_new, page.rows):
            values = (
                self._summaries.Summary.Value(tag=name, simple_value=value)
                for name, value in scalars(row).items()
            )
            summary = self._summaries.Summary(value=values)
            self._add(wall_time=row.at_s, step=row.step, summary=summary)
        self._writer.flush()
        _write_note(self._note, page.cursor, self._written)

    def idle(self, *, ends: bool) -> str:
        """Do nothing."""
        return ""

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _restart(self, step: int) -> None:
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(wall_time=time.time(), step=step, session_log=start)

    def _add(self, **fields: Any) -> None:
        self._writer.add_event(self._events.Event(**fields))


class RunSink(ABC):
    """A run of a service, which keeps the first value of every step and shows the plan and
    the best checkpoint.

    Args:
        note: Keeps what has been written.
    """

    def __init__(self, run: Run, note: Path) -> None:
        self._best, self._note = BestCheckpoint(run), note
        self._plan = ""
        self._written = _Written()

    def take(self, page: Page) -> None:
        """Log what is new in a page."""
        self._log(self._written.first_values(page))
        plans = (row.plan for row in reversed(page.rows) if isinstance(row, Minibatch))
        if (plan := next(plans, self._plan)) != self._plan:
            self._name_plan(plan)
            self._plan = plan
        _write_note(self._note, page.cursor, self._written)

    def idle(self, *, ends: bool) -> str:
        """Name the best checkpoint."""
        try:
            best = self._best.found(ends=ends)
        except (StorageError, CheckpointError) as error:
            return f"the best checkpoint is not named: {error}"
        if best is not None:
            self._name_best(best)
        return ""

    @abstractmethod
    def _log(self, values: Iterator[tuple[Row, dict[str, float]]]) -> None:
        """Log numbers of rows."""

    @abstractmethod
    def _name_plan(self, plan: str) -> None:
        """Show the plan that it trains with, as ``depth x width``."""

    @abstractmethod
    def _name_best(self, best: Best) -> None:
        """Refer to the best checkpoint."""


class Wandb(RunSink):
    """A run of Weights & Biases; a process that goes on resumes it.

    Args:
        options: ``track.wandb`` of the job file.
        run: The job; the run has its uid as its id.
        folder: Of W&B's own files.
        note: Keeps what has been written.
    """

    def __init__(self, options: dict[str, Any], run: Run, folder: Path, note: Path) -> None:
        import wandb

        super().__init__(run, note)
        self._artifact, self._name = wandb.Artifact, run.name
        self._run = wandb.init(
            project=options["project"],
            entity=options["entity"],
            mode=options["mode"],
            name=run.name,
            id=run.uid,
            tags=run.tags,
            resume="allow",
            dir=folder,
        )
        self._run.config.update(run.config, allow_val_change=True)
        # A run's own step cannot go back; a set is judged after later mini-batches.
        self._run.define_metric("*", step_metric="step")

    def begin(self) -> Cursor:
        """Return where to read on: after what this job has logged from anywhere."""
        cursor, self._written = _read_note(self._note)
        if self._run.resumed and cursor == Cursor():
            self._written.step = int(self._run.summary.get("step", 0))
        return cursor

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()

    def _log(self, values: Iterator[tuple[Row, dict[str, float]]]) -> None:
        for row, numbers in values:
            self._run.log({"step": row.step, **numbers})

    def _name_plan(self, plan: str) -> None:
        self._run.config.update({"plan": plan}, allow_val_change=True)

    def _name_best(self, best: Best) -> None:
        """Log an artifact that refers to it."""
        artifact = self._artifact(f"{self._name}-best", type="model", metadata={"step": best.step})
        artifact.add_reference(_url(best.path), checksum=False)
        self._run.log_artifact(artifact, aliases=["best", f"step-{best.step}"])


class Mlflow(RunSink):
    """A run of MLflow; a process that goes on asks what it holds.

    Args:
        options: ``track.mlflow`` of the job file.
        run: The job; the run has its uid as the tag ``spottrain.uid``.
        note: Keeps how far the measurements have been read.
    """

    def __init__(self, options: dict[str, Any], run: Run, note: Path) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        super().__init__(run, note)
        self._metric = Metric
        self._client = client = MlflowClient(tracking_uri=options["tracking_uri"])
        known = client.get_experiment_by_name(options["experiment"])
        experiment = (
            known.experiment_id
            if known is not None
            else client.create_experiment(
                options["experiment"], artifact_location=_beside(options["tracking_uri"])
            )
        )
        runs = client.search_runs([experiment], f"tags.`spottrain.uid` = '{run.uid}'")
        tags = {"spottrain.uid": run.uid, **dict.fromkeys(run.tags, "true")}
        its = runs[0] if runs else client.create_run(experiment, run_name=run.name, tags=tags)
        self._id = its.info.run_id
        client.update_run(self._id, status="RUNNING")
        # A parameter of a run cannot be changed: what a later resume has changed is left out.
        new = [
            Param(name, text[:MLFLOW_CHARACTERS])
            for name, text in run.flat().items()
            if name not in its.data.params
        ]
        for first in range(0, len(new), MLFLOW_PARAMS):
            client.log_batch(self._id, params=new[first : first + MLFLOW_PARAMS])
        self._names = list(its.data.metrics)

    def begin(self) -> Cursor:
        """Return where to read on; what the run holds is left out."""
        cursor, self._written = _read_note(self._note)
        for name in self._names:
            if name == "train/loss":
                self._written.step = self._last_step(name)
            elif name.endswith("/loss"):
                self._written.judged[name.removesuffix("/loss")] = self._last_step(name)
        return cursor

    def close(self) -> None:
        """Mark the run as finished, until a process goes on with it."""
        self._client.set_terminated(self._id)

    def _log(self, values: Iterator[tuple[Row, dict[str, float]]]) -> None:
        batch = [
            self._metric(name, value, int(1000 * row.at_s), row.step)
            for row, numbers in values
            for name, value in numbers.items()
        ]
        for first in range(0, len(batch), MLFLOW_BATCH):
            part = batch[first : first + MLFLOW_BATCH]
            self._client.log_batch(self._id, metrics=part)

    def _name_plan(self, plan: str) -> None:
        self._client.set_tag(self._id, "spottrain.plan", plan)

    def _name_best(self, best: Best) -> None:
        """Set a tag, and log an artifact."""
        self._client.set_tag(self._id, "spottrain.best_checkpoint", best.path)
        self._client.log_dict(self._id, best._asdict(), "best_checkpoint.json")

    def _last_step(self, name: str) -> int:
        history = self._client.get_metric_history(self._id, name)
        return max((int(metric.step) for metric in history), default=0)


# --- Files ----------------------------------------------------------------------------


def _lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield where the whole lines of a file end and what they are, the last first."""
    if not os.fstat(file.fileno()).st_size:
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = data.rfind(b"\n") + 1
        while end:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            yield end, data[begin:end]
            end = begin


def _beside(tracking_uri: str) -> str | None:
    """Return where the files of runs go whose numbers go to an SQLite file; servers know."""
    scheme, _, path = tracking_uri.partition(":///")
    return _url(str(Path(path).parent / "mlruns")) if scheme == "sqlite" else None


def _url(place: str) -> str:
    return place if "://" in place else Path(place).absolute().as_uri()


def _read(note: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(note.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found
