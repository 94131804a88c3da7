"""What the start of a VM takes, step by step: a first one, later ones without and with the
wheel cache.

A job from the command line on AWS's fake, whose VM is an OpenSSH server on loopback: its
``setup`` installs a package with pip from an index at a given rate; the bucket is as fast
as this machine. The VM is evicted twice: the next one finds the package in the bucket, the
one after that, for which the bucket is emptied, does not.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.fakes.aws import REGION
from tests.fakes.object_store import S3, bucket
from tests.fakes.package_index import PackageIndex
from tests.integration.aws_vms import AwsVms, aws_vms
from tests.integration.jobs import until
from tests.integration.test_aws_job import AwsJob

from spottrain.storage.open import open_store
from spottrain.varuna_manager.core.model.events import ReportReceived, VmsLaunched
from spottrain.varuna_manager.format import size
from spottrain.wire.messages import Calibrated

TORCH_BYTES, UNPACKED_BYTES = 3e9, 7e9
"""Of torch for CUDA with what it needs."""
DISKS_BYTES_PER_S = {
    "gp3 (AWS)": 125e6,
    "Standard SSD, E10 to E20 (Azure)": 60e6,
    "pd-balanced, 200 GiB (GCP)": 196e6,
}
"""What a disk writes: EBS, "General Purpose SSD volumes" (gp3's baseline, MiB/s); "Azure
managed disk types", Standard SSD; Compute Engine, "Performance limits for Balanced
Persistent Disk" (140 MiB/s and 0.28 for each GiB)."""
S3_BYTES_PER_S = 8 * 85e6
"""Eight connections ("Performance guidelines for Amazon S3": 85 to 90 MB/s each)."""
INDEX_BYTES_PER_S = (10e6, 25e6, 100e6)
"""pip downloads over one connection; no index documents its rate."""
Steps = dict[str, tuple[float, int, str]]
"""Seconds, bytes and source by step."""


def with_packages(folder: Path, cloud: AwsVms, s3: S3, index: PackageIndex) -> AwsJob:
    """Return a job on one VM whose setup installs from an index."""
    job = AwsJob(folder, "starts", cloud, s3)
    python = shlex.quote(sys.executable)
    job.settings["setup"] = f"{python} -m pip install -q --target packages tiny-thing"
    job.settings |= {"profile": None}  # it is to be measured
    job.settings["resources"] |= {"max_vms": 1}
    job.settings["checkpoint"] |= {"every_steps": 1}
    job.settings["env"] = {**job.settings["env"], **index.environment}
    job.settings["secrets"] = [x for x in job.settings["secrets"] if x != "A_SECRET"]
    job.save()
    return job


def starts_of(job: AwsJob, cloud: AwsVms, s3: S3) -> list[Steps]:
    """Run a job whose VM is evicted twice; return what its three starts took."""
    job.pace(0.3)
    answer = job.launch("--detach")
    assert answer.code == 0, answer.err
    packages = open_store(s3.url("jobs/on-aws/wheels"))

    def trained(number: int) -> list[dict[str, Any]] | None:
        report = job.run("report", job.name, "-o", "json")
        starts: list[dict[str, Any]] = json.loads(report.out)["starts"]
        done = [one for one in starts if one["first_step_s"] is not None]
        return done if len(done) == number else None

    def published() -> bool:
        return any(x.name.endswith("index.json") for x in packages.list())

    starts = until("a first VM trains", partial(trained, 1))
    for number in (2, 3):
        until("packages are published", published)
        if number == 3:
            packages.delete_folder("")
        instance_id = starts[-1]["vm_id"].split(".")[1]
        cloud.fake.ask("interrupt", region=REGION, instance_id=instance_id)
        starts = until(f"VM {number} trains", partial(trained, number))
    measured_s = _measured_s(job)
    assert job.run("down", job.name).code == 0
    first, *later = starts
    return [_steps(first, measured_s), *(_steps(one, None) for one in later)]


def _measured_s(job: AwsJob) -> float:
    """Return how long after the launch of the first VM the model was measured."""
    events = job.events()
    vm = next(e.vms[0] for e in events if isinstance(e, VmsLaunched))
    reports = (e for e in events if isinstance(e, ReportReceived))
    at_s = next(e.at_s for e in reports if isinstance(e.report, Calibrated))
    return at_s - vm.launched_at_s


def _steps(start: dict[str, Any], measured_s: float | None) -> Steps:
    """Return the steps of a start, whose milestones follow each other."""
    found: Steps = {
        step["name"]: (step["seconds"], step["num_bytes"], step["source"])
        for step in start["steps"]
    }
    waited_s = start["agent_s"] - sum(seconds for seconds, _, _ in found.values())
    found["between these"] = waited_s, 0, ""
    found["workers load"] = start["ready_s"] - start["agent_s"], 0, ""
    before_s = start["ready_s"]
    if measured_s is not None:
        found["measuring"] = measured_s - before_s, 0, ""
        before_s = measured_s
    found["plan, first step"] = start["first_step_s"] - before_s, 0, ""
    found["all"] = start["first_step_s"], 0, ""
    return found


def print_starts(starts: list[Steps]) -> None:
    """Print what starts took, side by side."""
    columns = ("first VM", "later, cache", "later, none")
    print(f"{'step':<18}" + "".join(f"{name:>14}{'bytes':>10}" for name in columns))
    for name in dict.fromkeys(name for steps in starts for name in steps):
        cells = ""
        for steps in starts:
            seconds, num_bytes, _ = steps.get(name, (None, 0, ""))
            cells += f"{'' if seconds is None else f'{seconds:.2f} s':>14}"
            cells += f"{size(num_bytes) if num_bytes else '':>10}"
        print(f"{name:<18}{cells}".rstrip())


def print_computed() -> None:
    """Print what packages take by documented rates."""
    print(f"\ncomputed, {size(TORCH_BYTES)} downloaded and {size(UNPACKED_BYTES)} unpacked")
    rates = ", ".join(f"{rate / 1e6:.0f}" for rate in INDEX_BYTES_PER_S)
    for disk, rate in DISKS_BYTES_PER_S.items():
        # pip writes a download to its cache and to a folder of its own, then unpacks it;
        # what comes from the bucket is written to the cache and unpacked.
        unpacked_s = UNPACKED_BYTES / rate
        from_bucket_s = max(TORCH_BYTES / S3_BYTES_PER_S, TORCH_BYTES / rate)
        from_index = ", ".join(
            f"{max(TORCH_BYTES / index, 2 * TORCH_BYTES / rate) + unpacked_s:.0f} s"
            for index in INDEX_BYTES_PER_S
        )
        print(
            f"  {disk}: {from_index} from an index at {rates} MB/s; "
            f"{from_bucket_s + unpacked_s:.0f} s from the bucket"
        )


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=20.0, help="size of the package")
    parser.add_argument("--rate", type=float, default=5.0, help="of the index, MB/s")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            PackageIndex(folder / "index", given.rate * 1e6) as index,
            aws_vms(folder / "aws") as cloud,
            bucket() as s3,
        ):
            index.add("tiny_thing", "1.0", int(given.mb * 1e6))
            with with_packages(folder, cloud, s3, index) as job:
                starts = starts_of(job, cloud, s3)
    print(f"a package of {given.mb:g} MB, from an index at {given.rate:g} MB/s\n")
    print_starts(starts)
    print_computed()


if __name__ == "__main__":
    main()
