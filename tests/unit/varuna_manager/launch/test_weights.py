"""Which checkpoint is exported, and what ``init_from`` names."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from tests.builders import a_manifest
from tests.fakes.object_store import S3

from spottrain.errors import ConfigError
from spottrain.manifest import (
    CheckpointEntry,
    CheckpointError,
    FileRecord,
    discard,
    read_manifest,
    write_manifest,
)
from spottrain.storage.open import open_store
from spottrain.storage.store import Store
from spottrain.varuna_manager.config.init_from import InitFromConfig
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.launch import weights
from spottrain.varuna_manager.launch.inspect import ToolError

FILE = FileRecord(section=0, file="section-0.safetensors", num_bytes=0, sha256="")
NAME = "step-{}-g1-00000000"


def complete(store: Store, step: int, best_step: int = 0) -> str:
    manifest = a_manifest(NAME.format(step), step, (FILE,))
    write_manifest(store, dataclasses.replace(manifest, best_step=best_step))
    return manifest.name


def config(**changes: object) -> JobConfig:
    data = {"name": "a", "entrypoint": "a:b", "minibatch_size": 8, "steps": 1}
    return parse_config({**data, **changes}, "job.yaml")


def test_a_checkpoint_is_chosen(tmp_path: Path) -> None:
    place, store = str(tmp_path), open_store(tmp_path)
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        weights._choose(place, None, None)
    for step in (10, 20):
        complete(store, step)
    (tmp_path / NAME.format(30)).mkdir()
    assert weights._choose(place, None, None).step == 20
    assert weights._choose(place, 10, None).step == 10
    assert weights._choose(place, None, NAME.format(10)).step == 10
    with pytest.raises(ConfigError, match=r"--step 30: .* holds step-20.*, step-10"):
        weights._choose(place, 30, None)


def test_the_best_one_is_known_from_the_newest(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        weights._best(str(tmp_path))
    complete(store, 10)
    with pytest.raises(ConfigError, match="no evaluation has named a best one"):
        weights._best(str(tmp_path))
    complete(store, 20, best_step=10)
    assert weights._best(str(tmp_path)).step == 10


@pytest.mark.parametrize("busy", [1, 3])
def test_the_best_one_is_looked_for_again_if_retention_has_deleted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    """After the newest was read, and before the best one is looked for, a better one is
    saved and the one before deleted."""
    store, list_all, looks = (
        open_store(tmp_path),
        weights._checkpoints,
        itertools.count(),
    )
    complete(store, 10)
    complete(store, 20, best_step=10)

    def list_later(place: str, uid: str) -> list[CheckpointEntry]:
        number, after = divmod(next(looks), 2)
        if after and number < busy:
            was = 10 + 20 * number
            complete(store, was + 20)
            complete(store, was + 30, best_step=was + 20)
            discard(store, NAME.format(was))
        return list_all(place, uid)

    monkeypatch.setattr(weights, "_checkpoints", list_later)
    assert weights._best(str(tmp_path)).step == 10 + 20 * busy


def test_a_best_one_that_is_nowhere_is_told(tmp_path: Path) -> None:
    complete(open_store(tmp_path), 20, best_step=10)
    with pytest.raises(CheckpointError, match="--step"):
        weights._best(str(tmp_path))


def read_beside(place: Path, busy: int) -> list[str]:
    """Read the newest checkpoint while a job saves so many, and keeps one of them; return
    the checkpoints that were tried."""
    store, steps = open_store(place), iter(range(20, 1000, 10))
    complete(store, 10)
    tried = []

    def use(source: weights.Source) -> str:
        tried.append(source.checkpoint)
        if len(tried) <= busy:
            complete(store, next(steps))
            discard(store, source.checkpoint)
        return read_manifest(store, source.checkpoint).name

    def choose() -> weights.Source:
        return weights.Source(str(place), weights._choose(str(place), None, None).name)

    assert weights._beside_retention(choose, use) == tried[-1]
    return tried


def test_a_checkpoint_that_is_deleted_while_it_is_read_gives_way_to_the_next(
    tmp_path: Path,
) -> None:
    tried = read_beside(tmp_path, busy=2)
    assert tried == [NAME.format(step) for step in (10, 20, 30)]


def test_a_reader_that_never_comes_to_read_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.keep"):
        read_beside(tmp_path, busy=1000)


def test_what_cannot_be_read_though_it_is_there_is_told_at_once(tmp_path: Path) -> None:
    complete(open_store(tmp_path), 10)
    tried = []

    def use(source: weights.Source) -> None:
        tried.append(source)
        raise ToolError("it is damaged")

    with pytest.raises(ToolError, match="it is damaged"):
        weights._beside_retention(lambda: weights.Source(str(tmp_path), NAME.format(10)), use)
    assert len(tried) == 1


def test_a_target_must_be_missing_or_an_empty_folder(tmp_path: Path) -> None:
    weights._check_target(tmp_path)
    weights._check_target(tmp_path / "new")
    (tmp_path / "file").touch()
    for target, reason in ((tmp_path, "not empty"), (tmp_path / "file", "no")):
        with pytest.raises(ConfigError, match=reason):
            weights._check_target(target)


def test_a_draft_is_removed_unless_it_was_renamed(tmp_path: Path) -> None:
    for keep in (False, True):
        with weights._draft(tmp_path / "deep" / "new") as draft:
            (draft / "file").touch()
            if keep:
                draft.rename(tmp_path / "deep" / "new")
        found = [path.name for path in (tmp_path / "deep").iterdir()]
        assert found == ["new"] * keep


def test_given_weights_are_a_checkpoint_or_files(tmp_path: Path, s3: S3) -> None:
    folder = tmp_path / "job"
    names = [complete(open_store(folder), step) for step in (10, 20)]
    assert weights._source(str(folder)) == (str(folder), names[1])
    assert weights._source(str(folder / names[0])) == (str(folder), names[0])
    assert weights._source(str(tmp_path)) == (str(tmp_path), "")
    url = s3.url("jobs/a")
    names = [complete(open_store(url), step) for step in (10, 20)]
    assert weights._source(url) == (url, names[1])
    assert weights._source(s3.url(f"jobs/a/{names[0]}")) == (url, names[0])
    with pytest.raises(ConfigError, match="no job nobody"):
        weights._source("nobody")


def test_init_from_is_a_path_or_a_section(tmp_path: Path) -> None:
    assert config().init_from is None
    short, long = config(init_from="x"), config(init_from={"path": "x"})
    assert short == long
    assert short.init_from == InitFromConfig(path="x")
    with pytest.raises(ConfigError, match="init_from"):
        config(init_from={"strict": False})

    (tmp_path / "gpt").mkdir()
    folder = InitFromConfig(path="gpt").absolute(tmp_path)
    assert folder.path == str(tmp_path / "gpt")
    job = InitFromConfig(path="gpt-2", strict=False).absolute(tmp_path)
    assert (job.path, job.strict) == ("gpt-2", False)
    with pytest.raises(ConfigError, match=r"no file or folder .*w\.safetensors"):
        InitFromConfig(path="w.safetensors").absolute(tmp_path)
    with pytest.raises(ConfigError, match=r"init_from\.path: "):
        InitFromConfig(path="ftp://a/b").absolute(tmp_path)


def test_a_place_with_checkpoints_cannot_begin(tmp_path: Path) -> None:
    complete(open_store(tmp_path), 10)
    job = config(init_from="x")
    with (
        pytest.raises(ConfigError, match="holds checkpoints already, such as step-10"),
        weights.first(job, str(tmp_path)),
    ):
        pass
    with weights.first(config(), str(tmp_path)) as first:
        assert first is None
