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


def is_released(transition: Transition) -> bool:
    """Return whether nothing is left to remove; else see to it."""
    state, release = transition.state, transition.state.release
    if not state.job.shares or (release is not None and release.done):
        return True
    tries = 0 if release is None else release.tries
    retry_at_s = None if release is None else release.retry_at_s
    if release is None or (retry_at_s is not None and transition.is_due(retry_at_s)):
        transition.state = replace(state, release=Release(tries=tries + 1))
        transition.emit(ReleaseJob())
    return False


def job_released(transition: Transition) -> None:
    """Nothing is left."""
    if transition.state.release is not None:
        release = replace(transition.state.release, done=True)
        transition.state = replace(transition.state, release=release)


def release_failed(transition: Transition, event: CommandFailed) -> None:
    """Try again after a pause, but not for ever."""
    release, name = transition.state.release, transition.state.job.spec.name
    if release is None:
        return
    if release.tries < TRIES:
        pause_s = FIRST_PAUSE_S * 2 ** (release.tries - 1)
        release = replace(release, retry_at_s=transition.now_s + pause_s)
        transition.log(f"what the VMs shared is not removed yet: {event.reason}")
    else:
        release = replace(release, done=True)
        transition.log(
            f"left in the cloud: {event.reason}; run 'spottrain down {name}' to remove it"
        )
    transition.state = replace(transition.state, release=release)
