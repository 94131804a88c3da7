"""The end of the end: what a job's VMs shared in the cloud is removed, or said to be left."""

from __future__ import annotations

from dataclasses import replace

from spottrain.varuna_manager.core.model.commands import ReleaseJob
from spottrain.varuna_manager.core.model.events import CommandFailed
from spottrain.varuna_manager.core.model.records import Release
from spottrain.varuna_manager.core.model.transition import Transition

TRIES = 6
"""Tries to remove it before somebody has to look."""
FIRST_PAUSE_S = 5.0
"""After the first try that failed; each later pause is twice as long."""


def is_released(turn: Transition) -> bool:
    """Return whether nothing is left to remove; else see to it."""
    state, release = turn.state, turn.state.release
    if not state.job.shares or (release is not None and release.done):
        return True
    tries = 0 if release is None else release.tries
    retry_at_s = None if release is None else release.retry_at_s
    if release is None or (retry_at_s is not None and turn.due(retry_at_s)):
        turn.state = replace(state, release=Release(tries=tries + 1))
        turn.do(ReleaseJob())
    return False


def job_released(turn: Transition) -> None:
    """Nothing is left."""
    if turn.state.release is not None:
        release = replace(turn.state.release, done=True)
        turn.state = replace(turn.state, release=release)


def release_failed(turn: Transition, event: CommandFailed) -> None:
    """Try again after a pause, but not for ever."""
    release, name = turn.state.release, turn.state.job.spec.name
    if release is None:
        return
    if release.tries < TRIES:
        pause_s = FIRST_PAUSE_S * 2 ** (release.tries - 1)
        release = replace(release, retry_at_s=turn.now_s + pause_s)
        turn.say(f"what the VMs shared is not removed yet: {event.reason}")
    else:
        release = replace(release, done=True)
        turn.say(
            f"left in the cloud: {event.reason}; run 'spottrain down {name}' to remove it"
        )
    turn.state = replace(turn.state, release=release)
