"""Asks the manager of a job over its control channel."""

from __future__ import annotations

import subprocess
import time
from http import HTTPStatus
from typing import Any

import httpx

from spottrain.codec import decode
from spottrain.errors import ConfigError, SpottrainError
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.identity import client_context, load_identity
from spottrain.varuna_manager.jobs.traces import TraceSet, TracesRefusedError
from spottrain.varuna_manager.launch.submit import (
    end_of,
)
from spottrain.wire.messages import TraceContent

ANSWER_S = 10.0
"""A manager that does not answer within this time counts as stuck."""
POLL_S = 0.05


class ManagerUnreachableError(SpottrainError):
    """The manager of a job runs but does not answer."""


def request_stop(job: JobDir, *, checkpoint: bool, now: bool, by: str = "command line") -> None:
    """Ask the manager of a job to stop it.

    Args:
        job: A job with a running manager.
        checkpoint: Write a checkpoint first.
        now: Return the VMs at once, whatever they do.
        by: Who asks.

    Raises:
        ManagerUnreachableError: The manager does not answer.
    """
    request = {"checkpoint": checkpoint, "now": now, "by": by}
    ask(job, "stop", request)


def ask(
    job: JobDir,
    what: str,
    request: dict[str, Any],
    refusal: type[SpottrainError] = SpottrainError,
) -> str:
    """Send a request to the manager of a job; return the body of its answer.

    Raises:
        ManagerUnreachableError: The manager does not answer.
        SpottrainError: It refuses the request: as ``refusal``.
    """
    address = job.manager()
    if address is None:
        raise ManagerUnreachableError(
            f"job {job.name}: its manager is still starting; try again in a moment"
        )
    try:
        answer = _call(job, "POST", f"{address.url}/v1/admin/{what}", request)
        if answer.status_code == HTTPStatus.CONFLICT:
            raise refusal(answer.json()["error"])
        answer.raise_for_status()
        return answer.text
    except httpx.HTTPError as error:
        raise ManagerUnreachableError(
            f"job {job.name}: its manager (pid {address.pid}) does not answer: "
            f"{error or type(error).__name__}; see 'spottrain logs {job.name}'"
        ) from error


def _call(job: JobDir, method: str, url: str, request: Any = None) -> httpx.Response:
    identity = load_identity(job.path)
    return httpx.request(
        method,
        url,
        json=request,
        headers={"Authorization": f"Bearer {identity.admin_token()}"},
        verify=client_context(identity.ca_pem),
        trust_env=False,
        timeout=ANSWER_S,
    )


def begin_traces(job: JobDir, minibatches: int, content: TraceContent = "profile") -> TraceSet:
    """Have the next mini-batches of a running job recorded; return before that is done.

    Raises:
        ConfigError: The job has no running manager.
        ManagerUnreachableError: The manager does not answer.
        TracesRefusedError: Nothing trains at the moment.
    """
    if not job.is_managed():
        raise ConfigError(
            f"job {job.name} does not run, so there is nothing to record; see "
            f"'spottrain status {job.name}'"
        )
    request = {"minibatches": minibatches, "content": content}
    begun: TraceSet = decode(TraceSet, ask(job, "profile", request, TracesRefusedError))
    return begun


def await_manager(job: JobDir, manager: subprocess.Popen[bytes]) -> None:
    """Wait until a manager that was just started serves its job, or has ended it.

    Raises:
        ManagerUnreachableError: The manager exited before that.
    """
    while not _serves(job, manager.pid):
        if manager.poll() is not None:
            if end_of(job):
                return
            if job.is_managed():
                raise ConfigError(
                    f"job {job.name} was resumed by another command at the same time; "
                    f"watch it with 'spottrain status {job.name} --watch'"
                )
            raise ManagerUnreachableError(
                f"job {job.name}: its manager exited right after its start: {job.last_words()}; "
                f"see 'spottrain logs {job.name}'"
            )
        time.sleep(POLL_S)


def _serves(job: JobDir, pid: int) -> bool:
    """Return whether process ``pid`` answers as the manager of a job."""
    address = job.manager()
    if address is None or address.pid != pid:
        return False
    try:
        _call(job, "GET", f"{address.url}/healthz")
    except httpx.HTTPError:
        return False
    return True
