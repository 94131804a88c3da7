"""What Slurm's commands are asked, and what they print."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.builders import a_launch, an_offer

from spottrain.cloud.port import errors, tags
from spottrain.cloud.port.provider import VmState
from spottrain.cloud.slurm import queue
from spottrain.cloud.slurm.settings import SlurmSettings

MARKS = json.dumps({tags.JOB: "job", tags.UID: "u", queue.TOKEN: "t/0"})
SETTINGS = SlurmSettings(partitions=("p",), folder="/shared")


def row(state: str, node: str = "n1", reason: str = "None", start: str = "1000") -> str:
    return f"7|{state}|{start}|2000|{reason}|p|{node}|me|{MARKS}\n"


@pytest.mark.parametrize(
    ("state", "found", "why"),
    [
        ("CONFIGURING", VmState.STARTING, ""),
        ("RUNNING", VmState.RUNNING, ""),
        ("SUSPENDED", VmState.RUNNING, ""),
        ("COMPLETING", VmState.STOPPING, "its batch job is ending"),
        ("COMPLETED", VmState.TERMINATED, ""),
        (
            "OUT_OF_MEMORY",
            VmState.TERMINATED,
            "killed: it used more memory than was asked for",
        ),
        ("NODE_FAIL", VmState.TERMINATED, "its node failed"),
        ("TIMEOUT", VmState.TERMINATED, "ended at its time limit"),
        ("PREEMPTED", VmState.TERMINATED, "preempted for a job of higher priority"),
        ("POWER_UP_NODE", VmState.STARTING, ""),
        ("A_STATE_OF_LATER", VmState.RUNNING, ""),
    ],
)
def test_a_batch_job_is_a_vm_in_its_state(state: str, found: VmState, why: str) -> None:
    (job,) = queue.parse_queue(row(state))
    assert (job.vm_id, job.state, job.why) == ("slurm.7", found, why)
    assert (job.start_s, job.end_s) == (1000.0, 2000.0)


# The states of slurm.h of 25.11 (as pyslurm 25.11.2 has it: `job_states`, `JOB_*`) by the names
# of squeue(1): 22.05 lists all but the last three.
ENDS = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
OTHERS = ("CONFIGURING", "COMPLETING", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED")
LATER = ("EXPEDITING", "LAUNCH_FAILED", "RECONFIG_FAIL")


@pytest.mark.parametrize("state", [*ENDS, *WAITING, *OTHERS, *LATER])
def test_only_an_end_is_taken_for_one(state: str) -> None:
    (with_node,) = queue.parse_queue(row(state))
    assert (with_node.state is VmState.TERMINATED) is (state in ENDS)
    if state in (*WAITING, *LATER):
        (waiting,) = queue.parse_queue(row(state, node="", reason="JobHeldAdmin"))
        assert (waiting.state, waiting.why[:12]) == (VmState.QUEUED, "JobHeldAdmin")


def test_what_accounting_says_is_read_as_the_queue() -> None:
    """The columns of sacct(1) with --parsable2, their forms as that page says."""
    marks = MARKS
    said = (
        f"7|CANCELLED by 1000|1000|2000|None|p|n1|me|{marks}\n"
        f"8|CANCELLED by 0|None|2000|Resources|p|None assigned|me|{marks}\n"
        f"9|OUT_OF_MEMORY|1000|1500|None|p|n2|me|{marks}\n"
        "10|COMPLETED|1000|1500|None|p|n2|me|\n"
    )
    cancelled, full = queue.parse_queue(said)
    assert (cancelled.number, cancelled.end_s) == (7, 2000.0)
    assert cancelled.why == "cancelled with scancel, by its owner or an administrator"
    assert (full.number, full.state) == (9, VmState.TERMINATED)


@pytest.mark.parametrize(
    ("reason", "state"),
    [("TimeLimit", "TIMEOUT"), ("OutOfMemory", "OUT_OF_MEMORY"), ("NodeDown", "NODE_FAIL")],
)
def test_one_that_is_ending_says_how_where_slurm_does(reason: str, state: str) -> None:
    (ending,) = queue.parse_queue(row("COMPLETING", reason=reason))
    (ended,) = queue.parse_queue(row(state))
    assert (ending.state, ending.why) == (VmState.STOPPING, ended.why)


@pytest.mark.parametrize(
    "line",
    [
        # docs.nesi.org.nz, "What does oom-kill mean?"
        "slurmstepd: error: Detected 1 oom-kill event(s) in step 370626.batch cgroup.",
        # Of 2024: NBISweden/Earth-Biogenome-Project-pilot, issue 81
        "slurmstepd: error: Detected 1959 oom_kill events in StepId=45226719.batch.",
        # galaxyproject/galaxy, lib/galaxy/jobs/runners/slurm.py
        "slurmstepd: error: Exceeded job memory limit",
        # seen with 22.05, several slurmd on one host
        "slurmstepd-n1: error: StepId=40459045.batch exceeded memory limit (14688256 > 10485760)",
    ],
)
def test_one_that_failed_for_want_of_memory_says_so_whatever_its_state(line: str) -> None:
    (killed,) = queue.parse_queue(row("OUT_OF_MEMORY"))
    assert queue.failure(f"step 1\n{line}\nterminated\n") == killed.why
    assert queue.failure(f"we exceeded: {line}\nend\n") == "its batch script failed: end"


def test_one_that_waits_says_why_and_until_when() -> None:
    (one,) = queue.parse_queue(row("PENDING", node="", reason="Priority", start="N/A"))
    assert (one.state, one.why, one.start_s) == (VmState.QUEUED, "Priority", None)
    (other,) = queue.parse_queue(row("PENDING", node="", reason="Resources"))
    assert other.why.startswith("Resources, expected to start at ")


def test_one_that_was_cancelled_while_it_waited_never_was_a_vm() -> None:
    assert queue.parse_queue(row("CANCELLED", node="")) == []


def test_batch_jobs_of_others_are_left_alone() -> None:
    others = "8|RUNNING|1|2|None|p|n1|me|(null)\n9|RUNNING|1|2|None|p|n1|me|a|b\n"
    assert [job.number for job in queue.parse_queue(others + row("RUNNING"))] == [7]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("invalid partition specified: x", errors.MisconfiguredError),
        ("Batch job submission failed: Invalid qos specification", errors.MisconfiguredError),
        (
            "QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates",
            errors.QuotaExceededError,
        ),
        ("Batch job submission failed: Access/permission denied", errors.AuthError),
        (
            "Batch job submission failed: Unable to contact slurm controller (connect failure)",
            errors.CloudError,
        ),
    ],
)
def test_refusals_are_told_apart(said: str, kind: type[errors.CloudError]) -> None:
    error = queue.refusal("sbatch", f"sbatch: error: {said}\n")
    assert type(error) is kind
    assert str(error).startswith("slurm: sbatch: ")


def test_a_batch_script_runs_the_users_commands_first_and_quotes_what_it_is_given(
    tmp_path: Path,
) -> None:
    python = tmp_path / "a python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$LOADED" "$PYTHONPATH" "$4" >"$OUT"\n')
    python.chmod(0o700)
    settings = SlurmSettings(
        partitions=("p",),
        folder=str(tmp_path),
        slot_memory_bytes=1,
        python=str(python),
        before="export LOADED=yes",
    )
    given = {"folder": "it's $HERE"}
    script = tmp_path / "script"
    script.write_text(queue.script(settings, "/with space", given))
    out = tmp_path / "out"
    subprocess.run(["bash", script], env={"OUT": str(out), "HOME": str(tmp_path)}, check=True)
    loaded, path, argument = out.read_text().splitlines()
    assert (loaded, path, json.loads(argument)) == ("yes", "/with space", given)


def test_options_of_the_job_file_reach_sbatch() -> None:
    settings = SlurmSettings(
        partitions=("p",),
        folder="/shared",
        slot_memory_bytes=1,
        gres="gpu:2",
        time_limit="4:00:00",
        options=("--mem=64G",),
    )
    marks = queue.marks(a_launch(an_offer(), 1), "u")
    argv = queue.launch_argv(settings, "/shared/u", "p", "name", marks)
    assert {"--gres=gpu:2", "--time=4:00:00", "--mem=64G", "--no-requeue"} <= set(argv)
    assert not any(one.startswith("--account") for one in argv)
    comment = next(one for one in argv if one.startswith("--comment="))
    assert json.loads(comment.removeprefix("--comment=")) == marks
