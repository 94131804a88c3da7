from __future__ import annotations

import base64
import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fakes.buckets import BUCKET, serve, write_key
from tests.fakes.object_store import CREDENTIALS, S3

from spottrain.storage import objects
from spottrain.storage.open import open_store
from spottrain.storage.store import (
    DeniedError,
    ExistsError,
    MissingError,
    StorageError,
    Store,
    UnreachableError,
    check_writable,
    is_url,
    local_folder,
    parse_url,
)

# --- what every store keeps to ---------------------------------------------------------


def test_an_object_that_is_put_can_be_read_listed_and_deleted(store: Store) -> None:
    store.put("a/one", b"1")
    store.put("a/deep/two + 50%é", b"22")
    store.put("b", b"")
    assert store.list() == [("a/deep/two + 50%é", 2), ("a/one", 1), ("b", 0)]
    assert store.list("a") == store.list()[:2]
    assert store.list("a/deep") == store.list()[:1]
    assert store.list("nothing") == []
    assert store.folders() == ["a"]
    assert store.get("a/deep/two + 50%é") == b"22"
    store.delete(["a/one", "was/never/there", "b"])
    store.delete([])
    assert [entry.name for entry in store.list()] == ["a/deep/two + 50%é"]
    store.delete_folder("a")
    store.delete_folder("a")
    assert store.list() == []


def test_a_folder_is_matched_by_its_whole_name(store: Store) -> None:
    store.put("step-1/x", b"")
    store.put("step-10/x", b"")
    assert store.list("step-1") == [("step-1/x", 0)]
    store.delete_folder("step-1")
    assert store.folders() == ["step-10"]


def test_put_overwrites_but_put_new_never_does(store: Store) -> None:
    store.put("x", b"old")
    store.put("x", b"new")
    with pytest.raises(ExistsError, match=r"/x.* exists"):
        store.put_new("x", b"newer")
    store.put_new("y", b"first")
    assert (store.get("x"), store.get("y")) == (b"new", b"first")


def test_a_missing_object_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=f"cannot read {store.place}/some/thing: "):
        store.get("some/thing")
    with pytest.raises(MissingError, match="some/thing"):
        store.fetch("some/thing", tmp_path / "target")
    with (
        pytest.raises(MissingError, match="some/thing"),
        store.reading("some/thing"),
    ):
        raise AssertionError
    assert not (tmp_path / "target").exists()


def test_files_larger_than_a_part_arrive_whole(store: Store, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(objects.PART_BYTES * 2 + 7))
    target.write_bytes(b"what was there before")
    store.put("big", source)
    store.fetch("big", target)
    assert target.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "source",
        "target",
    ]


def test_a_file_that_is_written_has_its_name_only_when_it_is_whole(
    store: Store,
) -> None:
    with store.writing("folder/file") as path:
        path.write_bytes(b"some")
        assert store.list() == []
        path.write_bytes(b"some more")
    with store.reading("folder/file") as path:
        assert path.read_bytes() == b"some more"
    with pytest.raises(ExistsError, match="exists"), store.writing("folder/file"):
        raise AssertionError
    with contextlib.suppress(KeyError), store.writing("folder/other") as path:
        path.write_bytes(b"half")
        raise KeyError
    assert [entry.name for entry in store.list()] == ["folder/file"]


def test_a_place_where_new_names_are_respected_can_be_written(store: Store) -> None:
    check_writable(store)
    assert store.list() == []


@pytest.mark.rotated
def test_listings_have_more_than_one_page(s3: S3) -> None:
    store = open_store(s3.url("many"))
    names = sorted(f"f{i % 3}/{i}" for i in range(objects.PAGE_KEYS + 5))
    for name in names:
        store.put(name, b"")
    assert [entry.name for entry in store.list()] == names
    for folder in store.folders():
        store.delete_folder(folder)
    assert store.list() == []


@pytest.mark.parametrize("cloud", ["gs", "az"])
def test_buckets_of_the_other_clouds_keep_to_it_too(
    cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key.json"
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(key))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"key").decode())
    with serve(cloud) as endpoint:
        write_key(key, endpoint)
        url = f"{cloud}://{BUCKET}/some/prefix?endpoint_url={endpoint}&account=mine"
        store = open_store(url, patience_s=1.0)
        check_writable(store)
        names = ["a/one", "a/two", "b/three + 50%é"]
        for name in names:
            store.put(name, name.encode())
        assert [entry.name for entry in store.list()] == names
        assert (store.folders(), len(store.list("a"))) == (["a", "b"], 2)
        with pytest.raises(ExistsError):
            store.put_new("a/one", b"")
        with pytest.raises(MissingError):
            store.get("a/none")
        with store.reading(names[2]) as path:
            assert path.read_bytes() == names[2].encode()
        # They call it an error that one is gone: the others go nevertheless.
        store.delete(["a/never", "a/one", "a/gone", "a/two"])
        assert store.folders() == ["b"]


# --- folders ---------------------------------------------------------------------------


def test_unfinished_files_are_deleted_with_their_folder(tmp_path: Path) -> None:
    killed = (
        "import os, signal, sys; from spottrain.storage.open import open_store\n"
        "with open_store(sys.argv[1]).writing('f/x') as path:\n"
        "    path.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
    store = open_store(tmp_path)
    assert done.returncode == -9
    assert (store.list(), store.folders()) == ([], ["f"])
    assert len(list((tmp_path / "f").iterdir())) == 1
    store.delete_folder("f")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_links_still_refuses_to_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    store = open_store(tmp_path)
    store.put_new("x", b"1")
    with pytest.raises(ExistsError):
        store.put_new("x", b"2")
    assert store.get("x") == b"1"


def test_a_link_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(outside)
    (tmp_path / "root" / "file").symlink_to(outside / "file")
    store = open_store(tmp_path / "root")
    assert (store.list(), store.folders()) == ([], [])


def test_trouble_with_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"^cannot write .*/file/x: Not a directory$"):
        open_store(tmp_path / "file").put("x", b"")


# --- URLs --------------------------------------------------------------------------------

PARTS = st.text("abcdefgh0123456789-", min_size=1, max_size=9)


@given(st.sampled_from(["s3", "gs", "az"]), PARTS, st.lists(PARTS, max_size=3))
def test_a_url_is_taken_apart(scheme: str, bucket: str, folders: list[str]) -> None:
    prefix = "/".join(folders)
    url = f"{scheme}://{bucket}/{prefix}"
    assert is_url(url)
    assert parse_url(url) == (scheme, bucket, prefix, {})
    asked = parse_url(f"{url}/?region=r&endpoint_url=http://h:1", {"region": "mine"})
    assert asked == (
        scheme,
        bucket,
        prefix,
        {"region": "mine", "endpoint_url": "http://h:1"},
    )


@given(st.text() | st.text().map("s3://{}".format))
@example("s3://[b")
@example("file://[b/c")
def test_any_text_is_a_folder_a_url_or_an_error_of_ours(text: str) -> None:
    with contextlib.suppress(StorageError):
        if local_folder(text) is None:
            parse_url(text)


def test_azure_is_known_by_all_its_names() -> None:
    place = ("az", "container", "p", {"account": "mine"})
    assert parse_url("az://container/p?account=mine") == place
    for scheme in ("abfs", "abfss"):
        url = f"{scheme}://container@mine.dfs.core.windows.net/p"
        assert parse_url(url) == place


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://x/y", "must be a folder or one of s3://, gs://, az://, .*: got 'ftp:"),
        ("s3:///prefix", "must be s3://<bucket>/<prefix>"),
        ("s3://key:secret@bucket/x", r"without credentials: got s3://…@bucket/x"),
        ("s3://b/x?secret=1", "options endpoint_url, region, account: got 'secret'"),
        ("file://host/x", "must be file:///<folder>"),
    ],
)
def test_a_wrong_url_is_reported_in_one_line(url: str, message: str) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        open_store(url)
    assert "key:secret" not in str(caught.value)


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/check%20points")
    store.put("x", b"1")
    assert (tmp_path / "check points" / "x").read_bytes() == b"1"


# --- what clouds refuse ------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_no_missing_object(s3: S3) -> None:
    gone = open_store(s3.url().replace("bucket-", "nobody-"))
    for ask in (
        gone.list,
        gone.folders,
        lambda: gone.get("x"),
        lambda: gone.put("x", b""),
    ):
        with pytest.raises(DeniedError, match="no such bucket: create it first"):
            ask()


@pytest.mark.usefixtures("s3")
def test_requests_to_a_server_that_does_not_answer_are_retried_then_reported() -> None:
    down = open_store("s3://b/x?endpoint_url=http://127.0.0.1:9", patience_s=0.2)
    with pytest.raises(UnreachableError, match="no answer: check the network") as caught:
        down.put("y", b"")
    assert not isinstance(caught.value, DeniedError)


@pytest.mark.parametrize("place", ["s3://b/x", "gs://b/x", "az://b/x?account=a"])
def test_without_credentials_the_message_says_where_they_may_come_from(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in tuple(os.environ):  # of other tests' clouds too
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "GCP_", "CLOUDSDK_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DeniedError, match=r"no credentials found: set [A-Z_]+"):
        open_store(place, patience_s=0.1).list()


def test_a_profile_of_the_cloud_s_tool_is_used(
    s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text("[profile mine]\nregion = eu-west-1\n")
    keys = "aws_access_key_id = a\naws_secret_access_key = b\n"
    (tmp_path / "credentials").write_text(f"[mine]\n{keys}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    check_writable(open_store(s3.url()))


def test_azure_needs_the_name_of_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StorageError, match=r"add \?account=<name>"):
        open_store("az://container")


def test_without_obstore_a_bucket_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StorageError, match="needs obstore: run pip install obstore"):
        open_store("s3://b/x")


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (
            "non-2xx status code: 403 Forbidden: <Error><Code>AccessDenied</Code>",
            DeniedError,
            r"no permission \(AccessDenied\): grant list, read, write and delete",
        ),
        (
            "non-2xx status code: 403 Forbidden: <Error><Code>ExpiredToken</Code>",
            DeniedError,
            r"credentials refused \(ExpiredToken\): renew them",
        ),
        (
            "Received redirect without LOCATION, normally a wrong region",
            DeniedError,
            r"in another region: add \?region=",
        ),
        (
            "non-2xx status code: 503 Slow Down: <Error><Code>SlowDown</Code>",
            UnreachableError,
            "the store answered SlowDown",
        ),
        ("something\nnew\n\nDebug source:\nX {\n}", UnreachableError, "something new$"),
    ],
)
def test_a_cloud_s_error_becomes_one_line_with_what_to_do(
    said: str, kind: type[StorageError], message: str
) -> None:
    from obstore.exceptions import GenericError

    with pytest.raises(kind, match=message) as caught, explained("s3://b/x", "write"):
        raise GenericError(said)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


explained = objects._translating_errors
