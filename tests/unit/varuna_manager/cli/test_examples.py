"""``spottrain doctor`` of the examples that the clouds' pages walk through, over the fakes
of the clouds and of their buckets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import aws, azure, buckets, gcp
from tests.fakes.azure_world import SUBSCRIPTION
from tests.integration.rented_jobs import know_gcp_prices

from spottrain.cloud.azure.settings import PRICES_VARIABLE
from spottrain.cloud.port.errors import CloudError
from spottrain.varuna_manager.config.files import read_job_file
from tests.commands import Run

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
L4 = "g2-standard-4"


@contextmanager
def on_aws(job: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Any]:
    with aws.running() as fake, buckets.serve("s3") as endpoint:
        fake.reset()
        fake.ask("quota", code="L-3819A6DF", vcpus=8)
        job["aws"] |= {"endpoint_url": fake.url}
        known = buckets.s3_environment(endpoint, buckets.S3_REGION)
        for name, value in {**known, **aws.CREDENTIALS}.items():
            patch.setenv(name, value)
        yield fake


@contextmanager
def on_azure(job: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Any]:
    with azure.running() as fake, buckets.serve("az") as endpoint:
        fake.reset()
        job["azure"] |= {"endpoint_url": fake.url, "authority_url": fake.url}
        job["checkpoint"]["path"] += f"?endpoint_url={endpoint}"
        patch.setenv("AZURE_SUBSCRIPTION_ID", SUBSCRIPTION)
        patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
        patch.setenv("REQUESTS_CA_BUNDLE", fake.ca_file)
        patch.setenv(PRICES_VARIABLE, fake.ask("prices_url"))
        yield fake


@contextmanager
def on_gcp(job: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[Any]:
    with gcp.running() as fake, buckets.serve("gs") as endpoint:
        fake.reset()
        fake.ask("quota", metric="PREEMPTIBLE_NVIDIA_L4_GPUS", limit=2)
        fake.ask("quota", metric="GPUS_ALL_REGIONS", limit=2)
        fake.ask("stock", zone=gcp.ZONE, kind=L4, count=2)
        job["gcp"] |= {"endpoint": fake.url, "project": gcp.PROJECT}
        job["checkpoint"]["path"] += f"?endpoint_url={endpoint}"
        yield fake


CLOUDS = {"aws": on_aws, "azure": on_azure, "gcp": on_gcp}


Doctor = Callable[[dict[str, Any]], tuple[int, dict[str, tuple[bool, str]]]]


@pytest.fixture
def doctor(run: Run, tmp_path: Path) -> Doctor:
    """Return what examines a job: the exit code, and what was found."""
    shutil.copy(EXAMPLES / "byte_gpt.py", tmp_path)

    def asked(job: dict[str, Any]) -> tuple[int, dict[str, tuple[bool, str]]]:
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        code, out, _ = run("doctor", tmp_path / "job.yaml", "-o", "json")
        found = json.loads(out)["findings"]
        return code, {each["what"]: (each["ok"], each["message"]) for each in found}

    return asked


def example(cloud: str) -> dict[str, Any]:
    """Return an example with the account's own bucket filled in."""
    job: dict[str, Any] = read_job_file(EXAMPLES / f"{cloud}.yaml")[0]
    path = job["checkpoint"]["path"].replace("my-bucket", buckets.BUCKET)
    job["checkpoint"]["path"] = path.replace("my-container", buckets.BUCKET)
    job[cloud]["ssh_from"] = ["192.0.2.0/24"]
    return job


@pytest.mark.rotated
@pytest.mark.parametrize("cloud", CLOUDS)
def test_an_account_with_quota_for_two_vms_is_found_ready(
    cloud: str, doctor: Doctor, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = example(cloud)
    if cloud == "gcp":
        know_gcp_prices(home, L4)
    with CLOUDS[cloud](job, monkeypatch) as fake:
        code, found = doctor(job)
        unencrypted = ["traffic between VMs"]
        assert [what for what, (ok, _) in found.items() if not ok] == unencrypted
        assert code == 0
        assert "enough for 2 of your 2 spot VMs" in found["quotas"][1]
        assert "spot VMs" in found["offers"][1]
        assert "NOT encrypted" in found["traffic between VMs"][1]
        assert fake.ask("left") == []
        assert fake.ask("drifts") == []


@pytest.mark.rotated
def test_without_a_spot_price_doctor_says_that_a_launch_would_be_refused(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = example("aws")
    job["aws"]["zones"] = ["us-east-1f"]
    with on_aws(job, monkeypatch):
        code, found = doctor(job)
    assert code == CloudError.exit_code
    assert not found["offers"][0]
    assert "run 'spottrain prices --cloud aws'" in found["offers"][1]
    assert "quotas" not in found, "they are enough for nothing"
