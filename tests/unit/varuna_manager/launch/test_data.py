"""A job's data on this machine, before and during a launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.hub import serve_hub
from tests.fakes.object_store import S3
from tests.fakes.web import serve_web

from spottrain.cloud.data.request import DataError
from spottrain.errors import ConfigError
from spottrain.storage.open import open_store
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.launch import data as job_data

JOB: dict[str, Any] = {
    "name": "job",
    "entrypoint": "train:job",
    "minibatch_size": 8,
    "steps": 1,
}
SSH: dict[str, Any] = {
    "resources": {"provider": "ssh"},
    "checkpoint": {"path": "/shared"},
    "ssh": {"hosts": [{"address": "a"}]},
}
AWS: dict[str, Any] = {
    "resources": {"provider": "aws"},
    "checkpoint": {"path": "/shared"},
    "aws": {"instance_types": ["g5.xlarge"], "disk_gib": 1},
}
CORPUS = "SPOTTRAIN_DATA_CORPUS"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_data, "_PATIENCE_S", 0.1)
    for name in (CORPUS, "SPOTTRAIN_DATA_B"):  # as it was in the end
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def url(s3: S3) -> str:
    open_store(s3.url("corpus")).put("a", b"1234")
    return s3.url("corpus/")


def job(provider: dict[str, Any], **data: Any) -> JobConfig:
    return parse_config({**JOB, **provider, "data": data}, "job")


def test_sizes_are_reported(url: str) -> None:
    told: list[str] = []
    assert job_data.prepare_data(job(AWS, corpus=url), told.append) == {}
    assert told[0] == "data corpus: 4 B in 1 file"


@pytest.mark.parametrize(
    ("url", "cloud"),
    [
        ("s3://b/a", "aws"),
        ("gs://b/a", "gcp"),
        ("abfs://c@account.dfs.core.windows.net/a", "azure"),
        ("s3://b/a?endpoint_url=https://minio.example", None),
        ("https://example.org/a", None),
    ],
)
def test_what_a_clouds_bucket_holds_costs_egress(url: str, cloud: str | None) -> None:
    assert job_data.holder(url) == cloud


def test_what_does_not_exist_is_refused(s3: S3) -> None:
    with pytest.raises(ConfigError, match=r"^data\.corpus: "):
        job_data.prepare_data(job(AWS, corpus=s3.url("nothing/")), lambda line: None)


def test_a_launch_names_the_commits_of_repositories(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        commit = hub.repository("org/llama").commit({"config.json": b"{}"})
        config = job(AWS, llama="hf://org/llama", words="https://example.org/a")
        config = job_data.pinned(config)
        assert config.data["llama"].url == f"hf://org/llama@{commit}"
        assert config.data["words"].url == "https://example.org/a"
        with pytest.raises(ConfigError, match=r"^data\.b: .*Invalid username"):
            job_data.pinned(job(AWS, b="hf://org/nothing"))


def test_data_that_is_not_visible_here_is_only_reported() -> None:
    told: list[str] = []
    job_data.prepare_data(job(AWS, corpus="https://127.0.0.1:1/a"), told.append)
    (line,) = told
    assert line.startswith("not visible from this machine: data corpus (https://127.0.0.1:1")
    assert line.endswith("; the VMs will try")


@pytest.fixture
def large() -> Iterator[dict[str, str]]:
    """Yield a dataset that is said to be larger than a gibibyte."""
    with serve_web() as web:
        web.files["/a"], web.claims = b"1", 2**30 + 1
        yield {"url": f"{web.url}/a", "sha256": "0" * 64}


def test_a_disk_that_is_too_small_for_all_data_is_refused(
    large: dict[str, str],
) -> None:
    with pytest.raises(
        ConfigError, match=r"aws\.disk_gib: the data takes 1\.1 GB.*got 1; raise it"
    ):
        job_data.prepare_data(job(AWS, corpus=large), lambda line: None)


def test_the_local_providers_data_is_fetched_once(url: str, s3: S3) -> None:
    job_data.ensure_data(job({}, corpus=url))
    found = Path(os.environ.pop(CORPUS))
    assert (found / "a").read_bytes() == b"1234"
    told: list[str] = []
    job_data.ensure_data(job({}, corpus=url), told.append)
    assert os.environ[CORPUS] == str(found)
    assert told == ["corpus: is cached, 4 B"]


def test_the_local_providers_data_must_be_there(s3: S3) -> None:
    with pytest.raises(DataError, match="corpus"):
        job_data.ensure_data(job({}, corpus=s3.url("nothing/")))


def test_a_small_dataset_is_fetched_to_inspect_a_model(url: str) -> None:
    job_data.ensure_data(job(AWS, corpus=url))
    assert (Path(os.environ[CORPUS]) / "a").read_bytes() == b"1234"


def test_a_large_one_is_not(large: dict[str, str]) -> None:
    job_data.ensure_data(job(AWS, corpus=large))
    assert CORPUS not in os.environ


def test_a_sample_stands_for_it(url: str, tmp_path: Path) -> None:
    job_data.ensure_data(job(AWS, corpus={"url": url, "sample": str(tmp_path)}))
    assert os.environ[CORPUS] == str(tmp_path)


def test_a_sample_that_is_not_there_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.corpus\.sample: nothing is there: got /few;"):
        job_data.ensure_data(job(AWS, corpus={"url": url, "sample": "/few"}))


def test_a_path_of_the_hosts_counts_if_it_is_here_too(tmp_path: Path) -> None:
    job_data.ensure_data(job(SSH, corpus={"path": str(tmp_path)}, b={"path": "/nowhere"}))
    assert os.environ[CORPUS] == str(tmp_path)
    assert "SPOTTRAIN_DATA_B" not in os.environ


def test_what_is_set_already_stays(url: str) -> None:
    os.environ[CORPUS] = "/mine"
    job_data.ensure_data(job({}, corpus=url))
    assert os.environ[CORPUS] == "/mine"
