"""Slurm's commands and what they print, as plain functions.

``squeue --json`` is not used: up to 22.05 it lists the jobs of all users whatever is asked
for, and its fields changed from release to release (numbers became objects, states lists).
The formats of ``squeue -o`` have been the same since long before, and ``sacct`` prints the same
columns; times are seconds since the epoch by SLURM_TIME_FORMAT (squeue(1), sacct(1),
"ENVIRONMENT VARIABLES").
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spottrain.cloud.clusters import Allocation
from spottrain.cloud.port import errors, tags
from spottrain.cloud.port.provider import LaunchRequest, VmState
from spottrain.cloud.slurm.settings import SlurmSettings
from spottrain.errors import one_line

TOKEN = "spottrain-token"
"""Tag with the token of the launch, and the number of the VM in it."""
_FORMAT = "%i|%T|%S|%e|%r|%P|%N|%u|%k"
"""Job id, state, (expected) start, end, reason, partition, nodes, user, comment."""
_COLUMNS = "JobIDRaw,State,Start,End,Reason,Partition,NodeList,User,Comment"
_STATES = {
    "CONFIGURING": VmState.STARTING,
    "POWER_UP_NODE": VmState.STARTING,
    "COMPLETING": VmState.STOPPING,
    "STAGE_OUT": VmState.STOPPING,
}
"""Of ``JOB STATE CODES`` in squeue(1), and of slurm.h of 25.11 (``job_states``, ``JOB_*``); see
``_ENDS`` for ends. All others run if they have a node, and wait if not: what a later Slurm
calls otherwise must not be taken for gone while it may run."""
FAILED = "its batch script failed"
_ENDS = {
    "BOOT_FAIL": "its node did not boot",
    "CANCELLED": "cancelled with scancel, by its owner or an administrator",
    "COMPLETED": "",
    "DEADLINE": "ended at its deadline",
    "FAILED": FAILED,
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "killed: it used more memory than was asked for",
    "PREEMPTED": "preempted for a job of higher priority",
    "REVOKED": "another cluster of the federation has started it",
    "TIMEOUT": "ended at its time limit",
}
_KILLED = re.compile(r"(?im)^slurmstepd(-\S+)?: error: .*(oom.kill event|memory limit)")
"""What is written into the output of a job that used too much memory. Where the kernel ended only
some of its processes, or Slurm's own accounting ended it (jobacct_gather, OverMemoryKill), its
state may be FAILED."""
_REASONS = {"NodeDown": "NODE_FAIL", "OutOfMemory": "OUT_OF_MEMORY", "TimeLimit": "TIMEOUT"}
"""The state in which a batch job that is ending will be, by the reason that is given."""
_NOWHERE = ("(null)", "None assigned")
_NOT_SEEN = "None"
"""The reason why a batch job waits that the scheduler has not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob(Allocation):
    """A batch job of ours, as the controller tells."""

    number: int


QUEUE_ARGV = ("squeue", "--noheader", "--me", "--states=all", f"--format={_FORMAT}")
"""The command that lists one's own batch jobs, with those ended lately."""


def past_argv(job: str) -> list[str]:
    """Return the command that lists the batch jobs of a job as Slurm's accounting knows them.

    Comments are kept there where AccountingStoreFlags has ``job_comment`` (slurm.conf).
    """
    options = ("--noheader", "--parsable2", "--allocations", "--starttime=now-30days")
    return ["sacct", *options, f"--name={name_of(job)}", f"--format={_COLUMNS}"]


def name_of(job: str) -> str:
    """Return the name of a job's batch jobs."""
    return f"spottrain-{job}"


def parse_queue(text: str, tag: str = tags.JOB) -> list[BatchJob]:
    """Return the batch jobs with a tag in what ``QUEUE_ARGV`` or ``past_argv`` print, oldest first.

    One that was cancelled while it waited never was one of them.

    Args:
        tag: By default that of VMs.
    """
    found = []
    for line in text.splitlines():
        number, state, start, end, reason, partition, node, user, comment = line.split("|", 8)
        marks = _tags_of(comment)
        if tag not in marks or not number.isdecimal():
            continue
        state, node = state.partition(" by ")[0], "" if node in _NOWHERE else node
        other = VmState.RUNNING if node else VmState.QUEUED
        now = VmState.TERMINATED if state in _ENDS else _STATES.get(state, other)
        start_s, end_s, why = _seconds(start), _seconds(end), _ENDS.get(state, "")
        if now is VmState.STOPPING:
            why = _ENDS.get(_REASONS.get(reason, ""), "its batch job is ending")
        if now is VmState.QUEUED:
            reason = "not considered by the scheduler yet" if reason == _NOT_SEEN else reason
            why = reason if start_s is None else f"{reason}, expected to start at {clock(start_s)}"
        if now is VmState.QUEUED or node:
            found.append(
                BatchJob(
                    vm_id=f"slurm.{number}",
                    number=int(number),
                    state=now,
                    start_s=start_s,
                    end_s=end_s,
                    why=why,
                    zone=partition,
                    node=node,
                    owner=user,
                    tags=marks,
                )
            )
    return sorted(found, key=lambda job: job.number)


def failure(output: str) -> str:
    """Return how a batch job ended whose state is FAILED, by what it printed."""
    if _KILLED.search(output):
        return _ENDS["OUT_OF_MEMORY"]
    return f"{FAILED}: {output.strip().rpartition(chr(10))[2] or 'it printed nothing'}"


def _seconds(text: str) -> float | None:
    return float(text) if text.isdecimal() and int(text) else None


def clock(at_s: float) -> str:
    """Return a moment for people, to the minute: expected starts move all the time."""
    return time.strftime("%d %b %H:%M", time.localtime(at_s))


def _tags_of(comment: str) -> dict[str, str]:
    try:
        value = json.loads(comment)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def marks(request: LaunchRequest, uid: str) -> dict[str, str]:
    """Return the tags of the VMs of a launch; that of the token has yet to be numbered."""
    return {
        tags.JOB: request.job,
        tags.UID: uid,
        tags.INTENT: request.intent,
        tags.PRICE: repr(request.offer.usd_per_hour),
        TOKEN: request.token,
    }


def launch_argv(
    settings: SlurmSettings, folder: str, partition: str, name: str, comment: Mapping[str, str]
) -> list[str]:
    """Return the command that submits one batch job, whose script is on stdin.

    It is never requeued: a VM that has ended does not come back (``--no-requeue``).
    """
    given = {
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "gres": settings.gres,
        "time": settings.time_limit,
    }
    return [
        *("sbatch", "--parsable", "--no-requeue", "--nodes=1", "--ntasks=1"),
        f"--partition={partition}",
        f"--job-name={name}",
        f"--comment={json.dumps(comment, separators=(',', ':'))}",
        f"--output={folder}/%j.log",
        f"--chdir={folder}",
        f"--signal=B:USR1@{settings.notice_s}",
        *(f"--{key}={value}" for key, value in given.items() if value),
        *settings.options,
    ]


def script(settings: SlurmSettings, package: str, given: Mapping[str, Any]) -> str:
    """Return the batch script.

    Args:
        settings: Of the job.
        package: Folder with our software.
        given: Arguments of ``on_node.Node``.
    """
    argv = [settings.python, "-P", "-m", "spottrain.cloud.slurm.on_node", json.dumps(given)]
    path = f"PYTHONPATH={shlex.quote(package)}${{PYTHONPATH:+:$PYTHONPATH}}"
    # A login shell, as `module` is defined in its files.
    return f"#!/bin/bash -l\n{settings.before}\nexport {path}\nexec {shlex.join(argv)}\n"


def refusal(program: str, output: str) -> errors.CloudError:
    """Return the error for what a command of Slurm's printed when it failed.

    Texts are those of ``slurm_strerror`` (src/common/slurm_errno.c).
    """
    lines = [line for line in output.strip().splitlines() if line.strip()]
    said = re.sub(r"^\w+: error: ", "", lines[-1]) if lines else "ended without a message"
    message = f"slurm: {program}: {one_line(Exception(said))}"
    for words, kind in _REFUSALS:
        if words in output:
            return kind(message)
    return errors.CloudError(message)


_REFUSALS: Sequence[tuple[str, type[errors.CloudError]]] = (
    ("AssocMaxSubmitJobLimit", errors.QuotaExceededError),
    ("QOSMaxSubmitJobPerUserLimit", errors.QuotaExceededError),
    ("temporarily unable to accept job", errors.QuotaExceededError),  # MaxJobCount, seen with 22.05
    ("Job violates accounting/QOS policy", errors.QuotaExceededError),
    ("Invalid account or account/partition combination", errors.MisconfiguredError),
    ("Invalid qos specification", errors.MisconfiguredError),
    ("invalid partition specified", errors.MisconfiguredError),
    ("Invalid feature specification", errors.MisconfiguredError),
    ("Invalid generic resource", errors.MisconfiguredError),
    ("Requested node configuration is not available", errors.MisconfiguredError),
    ("Requested time limit is invalid", errors.MisconfiguredError),
    ("User's group not permitted to use this partition", errors.MisconfiguredError),
    ("Access/permission denied", errors.AuthError),
)
