"""Repositories of the Hugging Face Hub as data."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download, parse_hf_uri
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.hub import TOKEN, Hub, serve_hub

from spottrain.cloud.data.cache import Cache
from spottrain.cloud.data.prepare import fetch_data
from spottrain.cloud.data.request import (
    DataError,
    DataMissingError,
    DataRequest,
    DataUnavailableError,
    HubUrl,
    from_json,
    to_json,
)
from spottrain.cloud.data.sources import open_source, pinned_url

FILES = {
    "README.md": b"read me",
    "data/train-0.bin": b"0" * 70_000,
    "data/train-1.bin": b"1" * 70_000,
    "data/more/test.txt": b"test",
    "grün & blau.txt": b"",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def request(url: str, *files: str) -> DataRequest:
    return DataRequest(name="corpus", url=url, files=files)


def fetched(folder: Path, url: str, *files: str) -> dict[str, bytes]:
    """Fetch a repository; return its files by their paths."""
    asked = from_json(to_json([request(url, *files)]))
    path = Path(fetch_data(asked, Cache(folder))["SPOTTRAIN_DATA_CORPUS"])
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {str(x.relative_to(path)): x.read_bytes() for x in path.rglob("*") if x.is_file()}


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_a_repository_is_a_folder_of_all_its_files(hub: Hub, tmp_path: Path, kind: str) -> None:
    hub.repository("org/corpus", kind).commit(FILES)
    prefix = "datasets/" if kind == "datasets" else ""
    assert fetched(tmp_path, f"hf://{prefix}org/corpus") == FILES


def test_a_folder_and_a_file_of_a_repository_are_as_in_a_bucket(hub: Hub, tmp_path: Path) -> None:
    hub.repository("org/corpus").commit(FILES)
    below = {x.removeprefix("data/"): y for x, y in FILES.items() if x.startswith("data/")}
    assert fetched(tmp_path, "hf://org/corpus/data/") == below
    assert fetched(tmp_path, "hf://org/corpus/data/more/test.txt") == {"test.txt": b"test"}
    assert fetched(tmp_path, "hf://org/corpus/README.md") == {"README.md": b"read me"}


def test_only_the_files_that_are_asked_for_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.repository("org/corpus").commit(FILES)
    found = fetched(tmp_path, "hf://org/corpus", "*-0.bin", "*.md")
    assert sorted(found) == ["README.md", "data/train-0.bin"]
    assert not [x for x in hub.asked if "train-1" in x]


def test_a_pinned_url_stays_what_it_was(hub: Hub, tmp_path: Path) -> None:
    repository = hub.repository("org/corpus")
    commit = repository.commit({"a.txt": b"1"}, "refs/pr/3")
    pinned = pinned_url(request("hf://org/corpus@refs/pr/3"))
    assert pinned == f"hf://org/corpus@{commit}"
    repository.commit({"a.txt": b"2"}, "refs/pr/3")
    assert fetched(tmp_path, "hf://org/corpus@refs/pr/3") == {"a.txt": b"2"}
    assert fetched(tmp_path, pinned) == {"a.txt": b"1"}
    assert pinned_url(request(pinned)) == pinned


def test_a_download_that_breaks_off_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    hub.repository("org/corpus").commit({"a.bin": content})
    hub.content.breaks_after = 3_000_000
    with pytest.raises(DataUnavailableError):
        fetched(tmp_path, "hf://org/corpus")
    assert fetched(tmp_path, "hf://org/corpus") == {"a.bin": content}
    assert hub.content.gets() == ["", "bytes=3000000-"]


@pytest.mark.parametrize("access", ["private", "gated"])
def test_what_is_not_public_takes_a_token(
    hub: Hub, tmp_path: Path, access: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.repository("org/corpus")
    repository.commit(FILES)
    repository.access = access
    with pytest.raises(DataError, match=r"put HF_TOKEN under secrets$"):
        fetched(tmp_path, "hf://org/corpus")
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(DataError, match=r"with the account of HF_TOKEN$"):
        fetched(tmp_path, "hf://org/corpus")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetched(tmp_path, "hf://org/corpus") == FILES


def test_the_server_of_large_files_does_not_see_the_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repository("org/corpus").commit(FILES)
    assert fetched(tmp_path, "hf://org/corpus") == FILES
    assert hub.content.authorized == [""] * 2


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("org/corpus@v9", "Invalid rev id: v9"),
        ("org/corpus/nothing/", '"nothing" does not exist'),
        ("org/corpus/nothing.txt", "nothing found"),
    ],
)
def test_what_is_not_there_is_said(hub: Hub, place: str, said: str) -> None:
    hub.repository("org/corpus").commit(FILES)
    with pytest.raises(DataMissingError) as caught:
        open_source(request(f"hf://{place}"))
    assert str(caught.value) == f"data corpus (hf://{place}): {said}; check the URL"


def test_a_hub_that_does_not_answer_may_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DataUnavailableError, match=r"no answer"):
        open_source(request("hf://org/corpus"))


def test_the_fake_hub_serves_its_own_client(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    repository = hub.repository("org/corpus", "datasets")
    commit = repository.commit(FILES)
    api = HfApi(endpoint=hub.url, token=False)
    info = functools.partial(api.repo_info, "org/corpus", repo_type="dataset", revision="main")
    assert info().sha == commit
    found = api.list_repo_tree("org/corpus", repo_type="dataset", recursive=True)
    sizes = {entry.path: entry.size for entry in found if hasattr(entry, "size")}
    assert sizes == {path: len(content) for path, content in FILES.items()}
    download = functools.partial(
        hf_hub_download, "org/corpus", repo_type="dataset", endpoint=hub.url, token=False
    )
    for name in ("data/train-0.bin", "README.md"):
        assert Path(download(name, cache_dir=tmp_path)).read_bytes() == FILES[name]
    repository.access = "gated"
    with pytest.raises(GatedRepoError):
        download("README.md", cache_dir=tmp_path / "other")
    repository.access = "private"
    with pytest.raises(RepositoryNotFoundError):
        info()


NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._]?[a-z0-9])*", fullmatch=True).filter(
    lambda name: ".." not in name and not name.endswith(".git") and len(name) < 90
)


@given(
    st.sampled_from(["", "models/", "datasets/"]),
    NAMES,
    NAMES,
    st.sampled_from(["", "@main", "@v1.0", "@refs/pr/7", "@refs/convert/parquet", "@a%2Fb"]),
    st.sampled_from(["", "/a", "/a/b.txt"]),
)
def test_urls_mean_what_they_mean_to_huggingface_hub(
    kind: str, owner: str, name: str, revision: str, path: str
) -> None:
    url = f"hf://{kind}{owner}/{name}{revision}{path}"
    found, known = HubUrl.parse(url), parse_hf_uri(url)
    assert found.kind == f"{known.type}s"
    assert found.repository == known.id
    assert found.revision == (known.revision or "main")
    assert found.path == known.path_in_repo
    assert HubUrl.parse(str(found)) == found


@pytest.mark.parametrize(
    "url", ["hf://org", "hf://datasets/org", "hf://spaces/a/b", "hf://buckets/a/b", "hf://a//b"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url must be hf://owner/model"):
        HubUrl.parse(url)
