"""The job file's part about data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spottrain.cloud.data.request import DataRequest
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.data import data_requests
from spottrain.varuna_manager.config.job import JobConfig, load_config, parse_config

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
    "aws": {"instance_types": ["g5.xlarge"]},
}
SHA256 = "0123456789abcdef" * 4


def parse(data: dict[str, Any], provider: dict[str, Any] = AWS) -> JobConfig:
    return parse_config({**JOB, **provider, "data": data}, "job.yaml")


def test_a_text_is_a_url() -> None:
    config = parse({"corpus": "s3://bucket/corpus/"})
    assert data_requests(config.data) == (DataRequest(name="corpus", url="s3://bucket/corpus/"),)


def test_requests_to_machines_have_what_the_job_file_says() -> None:
    config = parse(
        {
            "images": {"url": "gs://b/i.tar", "unpack": True, "sha256": SHA256},
            "shared": {"mount": "fs-1:/", "type": "nfs4", "options": "ro"},
        }
    )
    assert data_requests(config.data) == (
        DataRequest(name="images", url="gs://b/i.tar", unpack=True, sha256=SHA256),
        DataRequest(name="shared", mount="fs-1:/", type="nfs4", options="ro"),
    )


def test_it_is_the_same_after_a_restart() -> None:
    config = parse({"corpus": "s3://bucket/corpus/", "b": {"url": "https://host/b"}})
    assert parse_config(config.model_dump(mode="json"), "job") == config


def test_a_file_url_is_a_path() -> None:
    config = parse({"own": "file:///data/own", "other": {"path": "/x"}}, SSH)
    assert [wish.path for wish in data_requests(config.data)] == ["/data/own", "/x"]


def test_paths_here_are_relative_to_the_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    head = "{name: job, entrypoint: 'train:job', minibatch_size: 8, steps: 1, "
    file.write_text(head + "data: {own: {path: words}}}")
    assert load_config(file).data["own"].path == str(tmp_path / "words")
    file.write_text(head + "data: {far: {url: 's3://b/a', sample: few}}}")
    assert load_config(file).data["far"].sample == str(tmp_path / "few")


MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"Corpus": "s3://b/a"}, AWS, r"data.Corpus.\[key\]: String should match|data"),
    ({"a": {}}, AWS, "data.a: give one of url, path and mount: got none"),
    ({"a": {"url": "s3://b/a", "path": "/a"}}, AWS, "got url, path"),
    ({"a": {"url": "s3://b/a", "unpak": True}}, AWS, "did you mean unpack"),
    ({"a": "ftp://host/a"}, AWS, "url must begin with s3://.*: got ftp://host/a"),
    ({"a": "data/corpus"}, AWS, "url must begin with s3://"),
    ({"a": "http://host/a"}, AWS, "http:// needs sha256"),
    ({"a": "https://me:hunter2@host/a"}, AWS, "url must not hold a password"),
    ({"a": "ftp://me:hunter2@host/a"}, AWS, "url must not hold a password"),
    ({"a": "https://hunter2@host/a"}, AWS, "url must not hold a password"),
    ({"a": "https://host/a b"}, AWS, "must be ASCII without blanks"),
    ({"a": "https://host/gr\u00f6\u00dfe"}, AWS, "must be ASCII"),
    ({"a": "https://host/a/.."}, AWS, r"must not contain . or .. or %00"),
    ({"a": "s3://bucket/a/%2e%2e/b"}, AWS, r"must not contain . or .."),
    ({"a": "s3://bucket/a%00"}, AWS, r"must not contain . or .."),
    ({"a": "https://host/a/"}, AWS, "must name one object here"),
    ({"a": "s3://"}, AWS, "url must name a bucket or server"),
    ({"a": "s3://bucket/a?colour=red"}, AWS, "supports the options"),
    ({"a": {"url": "s3://b/a/", "unpack": True}}, AWS, "must name one object here"),
    ({"a": {"path": "/a", "unpack": True}}, SSH, "unpack needs a url"),
    ({"a": {"url": "file:///a", "sha256": SHA256}}, SSH, "sha256 needs a url"),
    ({"a": {"url": "s3://b/a", "sha256": "0123"}}, AWS, "data.a.sha256: String should"),
    ({"a": {"mount": "fs:/"}}, AWS, "mount needs type, such as nfs4"),
    ({"a": {"url": "s3://b/a", "type": "nfs"}}, AWS, "type and options need mount"),
    (
        {"a": {"mount": "-o:/", "type": "nfs4"}},
        AWS,
        "mount must be one word: got '-o:/'",
    ),
    ({"a": "hf://llama"}, AWS, "url must be hf://owner/model or hf://datasets/owner/name"),
    ({"a": "hf://org/llama/../b"}, AWS, r"must not contain . or .."),
    ({"a": {"url": "hf://org/llama", "unpack": True}}, AWS, "must name one object here"),
    ({"a": {"url": "hf://org/llama/a", "files": ["*"]}}, AWS, "files needs a url that is a"),
    ({"a": {"path": "/data"}}, AWS, "VMs of aws do not have /data"),
    ({"a": {"path": "data"}}, SSH, "path must be absolute on the hosts: got data"),
    ({"a": {"mount": "fs:/", "type": "nfs4"}}, {}, "the local provider cannot mount"),
]


@pytest.mark.parametrize(
    "query",
    [
        "sv=2024&sig=hunter2",
        "X-Amz-Signature=hunter2",
        "x-goog-credential=hunter2",
        "Expires=1&Signature=hunter2&Key-Pair-Id=K",
        "token=hunter2",
        "access_token=hunter2",
        "private_token=hunter2",
        "apikey=hunter2",
        "AWSAccessKeyId=hunter2",
        "password=hunter2",
    ],
)
@pytest.mark.parametrize("where", ["https://host/a", "https://host/a/", "ftp://host/a"])
def test_a_signed_url_is_refused_without_its_signature(query: str, where: str) -> None:
    with pytest.raises(ConfigError, match="password or signature, got") as caught:
        parse({"a": f"{where}?{query}"})
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "mount",
    [
        {"mount": "//server/share", "options": "ro,username=me,password=hunter2"},
        {"mount": "//server/share", "options": "PASS=hunter2"},
        {"mount": "//server/share", "options": "password2=hunter2"},
        {"mount": ":/", "options": "name=me,secret=hunter2"},
        {"mount": "folder", "options": "passphrase_passwd=hunter2"},
        {"mount": "https://me:hunter2@server/"},
    ],
)
def test_a_mount_with_a_password_is_refused_without_it(mount: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"password, got .*credentials=") as caught:
        parse({"a": {"type": "cifs", **mount}})
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        "https://host/a?design=2&version=3&key=images%2F12&tokens=9",
        "abfs://container@account.dfs.core.windows.net/a",
        "abfss://container@account.dfs.core.windows.net/a",
        "s3://bucket/two words/gr\u00f6\u00dfe",
        "hf://datasets/org/name@refs/convert/parquet/default/",
        {
            "mount": "//server/share",
            "type": "cifs",
            "options": "credentials=/etc/share,secretfile=/etc/key,sec=krb5",
        },
        {"mount": "user@server:/", "type": "fuse.sshfs"},
        {"mount": "[fd00::1]:/", "type": "nfs4"},
    ],
)
def test_what_only_looks_like_a_secret_is_none(data: Any) -> None:
    parse({"a": data})


@pytest.mark.parametrize(("data", "provider", "told"), MISTAKES)
def test_a_mistake_is_reported_in_one_line(
    data: dict[str, Any], provider: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        parse(data, provider)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)
