"""A job on rented VMs that come up and never train: ended, with a VM's own last words.

Real managers, SSH and agents; the cloud is AWS's fake (``aws_vms``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.aws import CREDENTIALS
from tests.fakes.object_store import CREDENTIALS as KEYS
from tests.fakes.object_store import bucket
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import aws_vms
from tests.integration.jobs import Job, until

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

WORDS = "ImportError: libexample.so.1: cannot open shared object file"


def breaks(module: str) -> str:
    """Return a setup after which a module cannot be imported, as without a library."""
    line = "raise " + WORDS.replace(": ", '("', 1) + '")'
    return f"""for file in $(find "$HOME" -path '*/{module}/__init__.py'); do
        echo '{line}' > "$file"; done"""


FAILURES = {
    "setup fails": (f"echo '{WORDS}' >&2; exit 7", 3, WORDS),
    "the agent does not start": (breaks("spottrain"), 6, WORDS),
    "the agent's software is another": (
        breaks("spottrain/pipeline"),
        6,
        "6 VMs in a row came up and never trained",
    ),
}
"""What is wrong with every VM: the job's setup; its exit code; what the user reads."""


@pytest.mark.parametrize(
    "kind",
    # Up to six starts, with the pauses between them.
    [
        kind if kind == "setup fails" else pytest.param(kind, marks=pytest.mark.nightly)
        for kind in FAILURES
    ],
)
def test_a_job_ends_whose_vms_never_train(kind: str, tmp_path: Path) -> None:
    setup, exit_code, says = FAILURES[kind]
    with (
        aws_vms(tmp_path / "aws") as cloud,
        bucket() as s3,
        Job(
            tmp_path,
            "never-trains",
            resources={"provider": "aws", "device": "cpu", "max_vms": 2},
            aws=cloud.section,
            checkpoint={"every_steps": 10, "path": s3.url("jobs/never-trains")},
            setup=setup,
            secrets=list(KEYS),
            manager={"suspect_s": 10.0},
        ) as job,
    ):
        job.environment |= CREDENTIALS
        assert job.launch("--detach").code == 0
        until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
        outcome = job.state().outcome
        assert outcome is not None
        assert (outcome.kind, outcome.exit_code) == ("failed", exit_code), outcome
        assert says in outcome.reason, outcome.reason
        assert len(cloud.fake.ask("bill")) <= 7  # two at once at first, then one at a time
        assert cloud.fake.ask("left") == []
