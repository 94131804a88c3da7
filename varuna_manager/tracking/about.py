"""What trackers show of a job beside its measurements: its settings, and its best weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spottrain.manifest import list_checkpoints, own_uids, read_manifest
from spottrain.redaction import redacted
from spottrain.storage.open import open_store
from spottrain.varuna_manager.jobs.folder import JobDir

LOOK_PAUSE_S = 60.0
"""Least time between two looks for the best checkpoint."""
_LEFT_OUT = frozenset({"notify", "ssh"})
"""Sections of the job file with addresses of people and machines."""


@dataclass(frozen=True, slots=True)
class Run:
    """A job, as a tracker shows it."""

    name: str
    uid: str
    """Of the job."""
    place: str
    """Where its checkpoints are: a folder or a URL."""
    config: Mapping[str, Any]
    """Job file, facts about the model, commit of the code; without secrets."""
    tags: tuple[str, ...] = ()
    """As the job file gives them."""

    def flat(self) -> dict[str, str]:
        """Return the settings by dotted names; lists as JSON."""
        return dict(_flat(self.config))


def describe(job: JobDir, uid: str, config: Mapping[str, Any]) -> Run:
    """Return what trackers show of a job.

    Args:
        uid: Its id.
        config: Its ``config.json``.

    Raises:
        ConfigError: A file of its folder is missing.
    """
    facts = job.facts()
    model = {
        "fingerprint": facts.fingerprint,
        "parameters": facts.num_parameters,
        "blocks": facts.blocks,
        "sections": len(facts.sections),
        "dataset_examples": facts.dataset_len,
        "optimizer": facts.optimizer,
    }
    shown = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    return Run(
        name=job.name,
        uid=uid,
        place=config["checkpoint"]["path"] or str(job.checkpoints),
        config=_presentable({"job": shown, "model": model, "code": {"commit": job.commit()}}),
        tags=tuple(config["track"]["tags"]),
    )


class Best(NamedTuple):
    """The best checkpoint by evaluation."""

    step: int
    path: str
    """Folder or URL."""


class BestCheckpoint:
    """Looks for the best checkpoint, as the newest one names it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: Best | None = None
        self._look_at_s = 0.0

    def found(self, *, ends: bool) -> Best | None:
        """Return the best checkpoint if it is another one than before.

        Args:
            ends: Look now, whenever the last look was.

        Raises:
            StorageError, CheckpointError: It cannot be read.
        """
        now_s = time.monotonic()
        if not ends and now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + LOOK_PAUSE_S
        store = open_store(self._run.place)
        there = list_checkpoints(store, own_uids(store, self._run.uid))
        step = read_manifest(store, there[0].name).best_step if there else 0
        best = next((Best(step, f"{store.place}/{x.name}") for x in there if x.step == step), None)
        if best == self._known:
            return None
        self._known = best
        return best


def _presentable(value: Any) -> Any:
    """Return settings without what is not set, and without secrets."""
    if isinstance(value, Mapping):
        told = {name: _presentable(one) for name, one in value.items()}
        return {name: one for name, one in told.items() if one not in (None, "", [], {})}
    if isinstance(value, list):
        return [_presentable(one) for one in value]
    return redacted(value) if isinstance(value, str) else value


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}" if name else key)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)
