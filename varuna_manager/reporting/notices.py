"""Notices: what has happened to a job that a person may want to act on.

A pure function of the job's state, so that nothing in the journal depends on whether
anybody is told: each notice has a key, the same one whenever it is found again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spottrain.units import counted
from spottrain.varuna_manager.config.notify import NoticeKind, NotifyConfig
from spottrain.varuna_manager.core.model.records import KEPT, Interruption
from spottrain.varuna_manager.core.model.state import JobPhase, State, spent_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One thing to tell, in a line."""

    key: str
    """Unique in the job's life."""
    notice: NoticeKind
    text: str


def notices(state: State, notify: NotifyConfig, now_s: float) -> tuple[Notice, ...]:
    """Return all notices that a state gives reason for, told before or not.

    Args:
        state: Of a submitted job.
        notify: Which are asked for, and from when on losses are many.
        now_s: Seconds since the epoch, by the manager's clock.
    """
    found = (
        *_losses(state.history.interruptions, notify),
        *_budget(state),
        *_stall(state, notify, now_s),
        *_nonfinite(state),
        *_end(state),
    )
    return tuple(one for one in found if one.notice in notify.on)


def _losses(interruptions: Sequence[Interruption], notify: NotifyConfig) -> Iterator[Notice]:
    """Yield one notice for each storm; it is over after a window without many."""
    recent = deque[Interruption]()
    stormy_s = float("-inf")
    if len(interruptions) == KEPT:  # earlier ones are forgotten: this may be the midst
        stormy_s = interruptions[0].at_s
    for loss in interruptions:
        recent.append(loss)
        while recent[0].at_s < loss.at_s - notify.window_s:
            recent.popleft()
        if len(recent) < notify.losses:
            continue
        if loss.at_s - stormy_s > notify.window_s:
            text = f"{len(recent)} interruptions within {notify.window_s:g} s: "
            text += ", ".join(f"{one.vm_id} ({one.interruption})" for one in recent)
            yield Notice(key=f"losses {loss.at_s:.3f}", notice="losses", text=text)
        stormy_s = loss.at_s


def _budget(state: State) -> Iterator[Notice]:
    for alert in state.history.alerts:
        share, cap = f"{alert.share:.0%}", f"{alert.cap:g} {alert.unit}"
        text = f"{share} of the budget of {cap} is spent"
        yield Notice(key=f"budget {share} of {cap}", notice="budget", text=text)


def _stall(state: State, notify: NotifyConfig, now_s: float) -> Iterator[Notice]:
    last_s = state.history.progress.last_commit_at_s
    if state.phase is not JobPhase.ACTIVE or last_s is None:
        return
    still_s = now_s - last_s
    if still_s > notify.stall_s:
        step = state.history.progress.step
        text = f"nothing committed since step {step}, {still_s:.0f} s ago: "
        key = f"stall at {step} since {last_s:.3f}"
        yield Notice(key=key, notice="stall", text=text + state.activity)


def _nonfinite(state: State) -> Iterator[Notice]:
    progress = state.history.progress
    if progress.nonfinite_in_row >= state.job.on_nonfinite.stop_after:
        text = (
            f"not finite: {counted(progress.nonfinite_in_row, 'mini-batch', 'mini-batches')} in a row, the "
            f"last of them {progress.nonfinite_last}"
        )
        key = f"nonfinite {progress.nonfinite_last}"
        yield Notice(key=key, notice="nonfinite", text=text)


def _end(state: State) -> Iterator[Notice]:
    outcome = state.outcome
    if state.phase is JobPhase.ENDED and outcome is not None:
        spent = spent_usd(state, state.now_s)
        text = f"{outcome.kind}: {outcome.reason}; {spent:.2f} USD spent"
        since_s = state.ending_since_s or 0.0
        yield Notice(key=f"end {since_s:.3f}", notice="end", text=text)
