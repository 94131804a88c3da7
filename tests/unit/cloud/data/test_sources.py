"""Sources of data: buckets and web servers, and their errors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.object_store import S3
from tests.fakes.web import Web, serve_web

from spottrain.cloud.data.request import (
    DataError,
    DataMissingError,
    DataRequest,
    DataUnavailableError,
)
from spottrain.cloud.data.sources import SourceFile, files_of, open_source
from spottrain.storage.open import open_store
from spottrain.storage.store import Version


@pytest.fixture
def web() -> Iterator[Web]:
    with serve_web() as web:
        yield web


def request(url: str, **what: str) -> DataRequest:
    return DataRequest(name="corpus", url=url, **what)  # type: ignore[arg-type]


def put(s3: S3, **content: bytes) -> None:
    store = open_store(s3.url("corpus"))
    for name, data in content.items():
        store.put(name.replace("__", "/"), data)


def test_a_prefix_is_a_folder_of_all_below_it(s3: S3, tmp_path: Path) -> None:
    put(s3, a=b"1", below__b=b"22")
    source = open_source(request(s3.url("corpus/")))
    assert source.is_folder
    assert [(f.name, f.num_bytes) for f in source.files] == [("a", 1), ("below/b", 2)]
    assert len({f.etag for f in source.files} - {""}) == 2
    source.fetch(source.files[1], tmp_path / "below" / "b")
    assert (tmp_path / "below" / "b").read_bytes() == b"22"


def test_without_a_slash_it_is_one_object(s3: S3, tmp_path: Path) -> None:
    put(s3, a=b"1", below__b=b"22")
    source = open_source(request(s3.url("corpus/below/b")))
    assert not source.is_folder
    assert [(f.name, f.num_bytes) for f in source.files] == [("b", 2)]
    source.fetch(source.files[0], tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"22"


def test_an_object_that_changes_has_another_etag(s3: S3) -> None:
    put(s3, a=b"1")
    before = open_source(request(s3.url("corpus/a"))).files
    put(s3, a=b"2")
    assert open_source(request(s3.url("corpus/a"))).files != before


@pytest.mark.parametrize("prefix", ["nothing/", "nothing"])
def test_missing_data_is_reported_as_missing(s3: S3, prefix: str) -> None:
    with pytest.raises(DataMissingError, match=r"^data corpus \(s3://.*check the URL"):
        open_source(request(s3.url(prefix)))


def test_a_missing_bucket_is_a_user_error(s3: S3) -> None:
    with pytest.raises(DataError, match="no such bucket"):
        open_source(request(s3.url("corpus/").replace(s3.bucket, "no-such-bucket")))


def test_an_unreachable_store_may_be_retried(s3: S3) -> None:
    with pytest.raises(DataUnavailableError, match=r"^data corpus \(s3://"):
        open_source(request("s3://bucket/a?endpoint_url=http://127.0.0.1:1"), patience_s=0.1)


def test_a_wrong_hash_is_an_error_and_removes_the_file(s3: S3, tmp_path: Path) -> None:
    put(s3, a=b"1")
    source = open_source(request(s3.url("corpus/a"), sha256="0" * 64))
    with pytest.raises(DataError, match="differs from the job file"):
        source.fetch(source.files[0], tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_web_servers_file_is_fetched(web: Web, tmp_path: Path) -> None:
    web.files["/below/words.bin"] = b"x" * 5000
    sha256 = hashlib.sha256(b"x" * 5000).hexdigest()
    source = open_source(request(f"{web.url}/below/words.bin", sha256=sha256))
    (file,) = source.files
    assert (file.name, file.num_bytes, bool(file.etag)) == ("words.bin", 5000, True)
    source.fetch(file, tmp_path / "words.bin")
    assert (tmp_path / "words.bin").read_bytes() == b"x" * 5000
    assert [path.name for path in tmp_path.iterdir()] == ["words.bin"]


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_an_interrupted_download_is_resumed(web: Web, tmp_path: Path, knows_ranges: bool) -> None:
    content = bytes(range(256)) * 20_000
    web.files["/a"], web.breaks_after = content, 3_000_000
    web.knows_ranges = knows_ranges
    source = open_source(request(f"{web.url}/a"))
    (file,) = source.files
    with pytest.raises(DataUnavailableError, match=r"connection lost|got 3000000 of 5120000"):
        source.fetch(file, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    source.fetch(file, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == content
    assert web.gets() == ["", "bytes=3000000-"]


def test_a_partial_download_of_another_version_is_not_resumed(web: Web, tmp_path: Path) -> None:
    web.files["/a"], web.breaks_after = b"1" * 4_000_000, 3_000_000
    source = open_source(request(f"{web.url}/a"))
    with pytest.raises(DataUnavailableError):
        source.fetch(source.files[0], tmp_path / "a")
    web.files["/a"] = b"2" * 4_000_000
    source = open_source(request(f"{web.url}/a"))
    source.fetch(source.files[0], tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"2" * 4_000_000


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        (404, DataMissingError),
        (403, DataError),
        (401, DataError),
        (429, DataUnavailableError),
        (503, DataUnavailableError),
    ],
)
def test_the_http_status_decides_whether_to_retry(
    web: Web, says: int, kind: type[Exception]
) -> None:
    web.files["/a"], web.says = b"1", says
    with pytest.raises(kind, match=f"its server answered {says}") as caught:
        open_source(request(f"{web.url}/a"))
    assert type(caught.value) is kind


def test_an_unreachable_web_server_may_be_retried() -> None:
    with pytest.raises(DataUnavailableError, match=r"no answer: .*refused"):
        open_source(request("http://127.0.0.1:1/a"))


def versions(*names: str, num_bytes: int = 0) -> list[Version]:
    return [Version(name, num_bytes, "") for name in names]


def test_folder_placeholders_are_no_files() -> None:
    found = versions("", "folder", "folder/a", "empty", "other/")
    names = [file.name for file in files_of(request("s3://b/"), found)]
    assert names == ["folder/a", "empty"]


def test_an_object_that_is_also_a_folder_is_refused(
    s3: S3,
) -> None:
    put(s3, a=b"1", a__b=b"2")
    with pytest.raises(DataError, match="'a' is both an object and a folder"):
        open_source(request(s3.url("corpus/")))


@pytest.mark.parametrize("last", ["..", "%2e%2e", "a%00b"])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_url_without_a_valid_file_name_is_refused(web: Web, scheme: str, last: str) -> None:
    web.files[f"/{last}"] = b"1"
    above = {"s3": "s3://bucket", "http": web.url}[scheme]
    with pytest.raises(DataError, match="object name"):
        open_source(request(f"{above}/{last}"), patience_s=0.1)


@pytest.mark.parametrize("last", ["two words", "gr\u00f6\u00dfe", "line\nline", "a\0b"])
def test_an_invalid_url_is_a_user_error(web: Web, last: str) -> None:
    with pytest.raises(DataError, match=r"invalid URL: .*check it"):
        open_source(request(f"{web.url}/{last}"))


@pytest.mark.parametrize("claims", ["many", "-1", "1e3", ""])
def test_an_invalid_content_length_is_refused(web: Web, claims: str) -> None:
    web.files["/a"], web.claims = b"1", claims
    with pytest.raises(DataError, match="does not report its size"):
        open_source(request(f"{web.url}/a"))


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "a/\0"])
def test_a_name_outside_the_folder_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"object name .* is not allowed; rename it"):
        list(files_of(request("s3://b/"), versions(name, num_bytes=1)))


@given(st.lists(st.text(min_size=1), unique=True))
def test_accepted_names_stay_in_the_folder(names: list[str]) -> None:
    folder = Path("/cache/key")
    for name in names:
        try:
            (file,) = files_of(request("s3://b/"), versions(name, num_bytes=1))
        except DataError:
            continue
        assert isinstance(file, SourceFile)
        assert (folder / file.name).resolve().is_relative_to(folder)
