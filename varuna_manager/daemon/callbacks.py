"""Calls what a job has asked for by ``callbacks``: ``… daemon.callbacks <job_dir> <sink> <uid>``.

The process follows the job as those that write its measurements do, and lets a child make
each call (``pipeline.weights.callback``). What a function does to itself, its memory or its
disk is told, and harms nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from spottrain.errors import SpottrainError, one_line
from spottrain.files import write_whole
from spottrain.manifest import (
    CheckpointEntry,
    CheckpointError,
    list_checkpoints,
    own_uids,
    read_manifest,
)
from spottrain.storage.open import open_store
from spottrain.storage.store import StorageError
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.jobs.measurements import Cursor, Evaluation, Page
from spottrain.varuna_manager.launch import data
from spottrain.varuna_manager.launch.inspect import run_tool
from spottrain.varuna_manager.launch.workdir import unpack
from spottrain.varuna_manager.tracking.lines import scalars
from spottrain.varuna_manager.tracking.main import write

_CALLER = "spottrain.pipeline.weights.callback"
LOOK_PAUSE_S = 10.0
"""Least time between two looks for checkpoints."""
_RESUMABLE = ("stopped", "queued")
"""Outcomes of jobs that are to go on."""


class _Call(NamedTuple):
    name: str
    step: int
    checkpoint: CheckpointEntry | None = None
    outcome: str = ""


class Callbacks:
    """The calls of one job, which are made one after the other.

    Of each function the step of its newest call is kept once that has ended, however it did:
    a call that the end of this process cut short is made again.

    Args:
        job: The job's folder.
        uid: Its id.
        options: Further arguments of each call.
    """

    def __init__(self, job: JobDir, uid: str, *options: str) -> None:
        self._job, self._uid, self._options = job, uid, options
        facts, self._config = job.facts(), job.config()
        self._asked, self._limit_s = facts.callbacks, facts.callback_limit_s
        self._sets = set(facts.heldout_sets)
        self._place = self._config.checkpoint.path or str(job.checkpoints)
        self._log = job.path / "tracking" / "callbacks.log"
        self._note = job.path / "tracking" / "callbacks.json"
        self._done: dict[str, int] = {}
        """Step of the newest call that has ended."""
        self._trouble: dict[str, str] = {}
        """Why it failed."""
        if self._note.exists():
            self._done, self._trouble = json.loads(self._note.read_text())
        self._evaluated: dict[int, dict[str, float]] = {}
        """Of the final history: metrics by step."""
        self._position = -1
        """Of the newest row."""
        self._look_at_s = 0.0
        self._out_of_reach = ""
        """Why checkpoints cannot be seen."""

    def begin(self) -> Cursor:
        """Return where to read on: evaluations are not kept elsewhere."""
        return Cursor()

    def take(self, page: Page) -> None:
        """Remember what was evaluated."""
        if (above := page.rewound_to) is not None:
            self._evaluated = {k: v for k, v in self._evaluated.items() if 2 * k + 1 < above}
        for row in page.rows:
            self._position = row.position
            if isinstance(row, Evaluation):
                self._evaluated.setdefault(row.step, {}).update(scalars(row))

    def idle(self, *, ends: bool) -> str:
        """Make the calls that are due; return what failed.

        Args:
            ends: The manager has closed this process's stdin: if its job has not ended, the
                next manager's process goes on.
        """
        outcome = ""
        if ends:
            state = read_state(self._job)
            if state.phase is not JobPhase.ENDED or state.outcome is None:
                return self._told()
            outcome = state.outcome.kind
        due = [*self._of_evaluations(outcome)]
        now_s = time.monotonic()
        if outcome or now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_PAUSE_S
            try:
                due += self._of_checkpoints(outcome)
                self._out_of_reach = ""
            except (SpottrainError, OSError) as error:
                self._out_of_reach = one_line(str(error))
                due += self._of_end(None, outcome)
        for call in due:
            if call.name in self._asked and call.step > self._done.get(call.name, -1):
                self._make(call)
        return self._told()

    def close(self) -> None:
        """Nothing is open."""

    def _told(self) -> str:
        return "; ".join(filter(None, [*self._trouble.values(), self._out_of_reach]))

    def _of_evaluations(self, outcome: str) -> Iterator[_Call]:
        """Yield the call for the newest evaluation.

        Args:
            outcome: How the job ended; empty: it has not.
        """
        whole = (k for k, v in self._evaluated.items() if outcome or self._is_whole(k, v))
        if (evaluated := max(whole, default=None)) is not None:
            yield _Call("on_evaluate", evaluated)

    def _of_checkpoints(self, outcome: str) -> Iterator[_Call]:
        """Yield the calls for the newest checkpoint, the best, and the end.

        Raises:
            StorageError, CheckpointError: They cannot be read.
        """
        store = open_store(self._place)
        there = list_checkpoints(store, own_uids(store, self._uid))
        newest = there[0] if there else None
        if newest is not None and newest.step:
            # Once what was measured before it is here, too: it may come a moment later.
            if outcome or self._position >= 2 * newest.step:
                yield _Call("on_checkpoint", newest.step, newest)
            best_step = read_manifest(store, newest.name).best_step
            best = next((x for x in there if best_step and x.step == best_step), None)
            if best is not None and (outcome or best_step in self._evaluated):
                yield _Call("on_best", best_step, best)
        yield from self._of_end(newest, outcome)

    def _of_end(self, newest: CheckpointEntry | None, outcome: str) -> Iterator[_Call]:
        if outcome and outcome not in _RESUMABLE:
            step = newest.step if newest else max(0, self._position // 2)
            yield _Call("on_end", step, newest, outcome)

    def _is_whole(self, step: int, metrics: dict[str, float]) -> bool:
        """Return whether all sets are there: they are reported one by one."""
        there = {name.partition("/")[0] for name in metrics}
        return self._position > 2 * step + 1 or there >= self._sets

    def _make(self, call: _Call) -> None:
        """Make a call and note its end; one of a checkpoint that is deleted meanwhile is
        none."""
        scratch = self._job.path / "callbacks"
        shutil.rmtree(scratch, ignore_errors=True)
        trouble = ""
        try:
            unpack(self._job.workdir, scratch / "workdir")
            os.environ.update(self._config.env)
            data.ensure_data(self._config)
            told = {
                "job": self._job.name,
                "step": call.step,
                "metrics": self._evaluated.get(call.step, {}),
                "outcome": call.outcome,
            }
            options = [*self._options]
            if call.checkpoint is not None:
                options += ["--store", self._place, "--checkpoint", call.checkpoint.name]
            run_tool(
                _CALLER,
                self._config,
                *(call.name, json.dumps(told), str(scratch), str(self._log), *options),
                workdir=str(scratch / "workdir"),
                timeout_s=self._limit_s,
            )
        except (SpottrainError, OSError) as error:
            if call.checkpoint is not None and not self._is_there(call.checkpoint):
                return
            trouble = one_line(f"{call.name} of step {call.step}: {error}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._done[call.name] = call.step
        self._trouble.pop(call.name, None)
        if trouble:
            self._trouble[call.name] = trouble
        write_whole(self._note, json.dumps([self._done, self._trouble]))

    def _is_there(self, checkpoint: CheckpointEntry) -> bool:
        try:
            read_manifest(open_store(self._place), checkpoint.name)
        except CheckpointError:
            return False
        except StorageError:
            pass
        return True


def main() -> int:
    """Make the calls of the job in folder ``argv[1]``, whose id is ``argv[3]``."""
    return write(sys.argv[1:], lambda job, _, uid: Callbacks(JobDir(job), uid))


if __name__ == "__main__":
    sys.exit(main())
