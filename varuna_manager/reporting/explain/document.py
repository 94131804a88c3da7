"""The answer of ``spottrain explain``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from spottrain.errors import ConfigError
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.format import clock
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.reporting.documents import SCHEMA_VERSION
from spottrain.varuna_manager.reporting.explain import chain, words

LAST = "last"


def explanation(job: JobDir, about: str | None) -> dict[str, Any]:
    """Return why something happened, as a document.

    Args:
        job: Whose journal is read; no manager is needed.
        about: The number of an event, the id of a VM, ``last`` for the newest message; None:
            what the job does now, or why it ended.

    Returns:
        ``about``, ``now`` (lines on the present, if asked for), and ``chain``: the events in
        order, each with ``seq``, ``at_s``, ``kind``, ``what``, ``because`` (the number of
        its cause, or None) and ``decided`` (lines).

    Raises:
        ConfigError: There is no such event or VM.
        JournalError: The journal is missing or damaged.
    """
    with closing(Journal(job.journal, read_only=True)) as journal:
        state = journal.replay() if about is None else None
        numbers = sorted(_numbers(journal, job, about, state))
        links = []
        for row, step in chain.steps_of(journal, numbers):
            links.append(
                {
                    "seq": row.seq,
                    "at_s": row.at_s,
                    "kind": row.kind,
                    "what": words.happened(step.event),
                    "because": chain.cause(journal, row.seq),
                    "decided": list(words.decided(step, chain.asked_of(row))),
                }
            )
    present = [] if state is None else list(words.now(state))
    return {
        "schema_version": SCHEMA_VERSION,
        "name": job.name,
        "about": about,
        "now": present,
        "chain": links,
    }


def _numbers(journal: Journal, job: JobDir, about: str | None, state: State | None) -> set[int]:
    """Return which events explain it."""
    if about is None:
        assert state is not None
        if state.outcome is not None:
            newest = chain.newest_change(journal, "outcome")
        elif state.training.generation:
            newest = chain.newest_change(journal, "next_generation", "training")
        else:
            newest = chain.newest_change(journal, "activity")
        return set() if newest is None else set(chain.chain(journal, newest))
    if about == LAST:
        newest = chain.newest_message(journal) or journal.last_seq()
        return set(chain.chain(journal, newest)) if newest else set()
    if about.isdigit():
        seq, last = int(about), journal.last_seq()
        if not 1 <= seq <= last:
            raise ConfigError(
                f"job {job.name} has no event {about}: its events are 1 to {last}; "
                f"'spottrain events {job.name} -o json' lists them"
            )
        return set(chain.chain(journal, seq))
    if not (known := chain.begun(journal, about)):
        raise ConfigError(
            f"job {job.name} never had a VM {about}; give the number of an event, the id of "
            f"a VM ('spottrain cost {job.name} --by vm' lists them), or '{LAST}'"
        )
    end = chain.left(journal, about)
    known += [] if end is None else [end]
    return {seq for one in known for seq in chain.chain(journal, one)}


def explanation_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield an explanation for people: causes first, what follows from each below it."""
    if document["now"]:
        activity, *more = document["now"]
        yield f"now: {activity}"
        yield from (f"    {line}" for line in more)
        if document["chain"]:
            yield ""
            yield "how it came to this:"
    for link in document["chain"]:
        because = link["because"]
        cause = f" (because of event {because})" if because is not None else ""
        yield f"{clock(link['at_s'])} event {link['seq']}: {link['what']}{cause}"
        for line in link["decided"] or ("nothing was decided because of it",):
            yield f"    -> {line}"
    if not document["chain"] and not document["now"]:
        yield "nothing has happened yet"
