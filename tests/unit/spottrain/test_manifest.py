from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spottrain.errors import SpottrainError, WireError
from spottrain.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    FileRecord,
    Manifest,
    TensorRecord,
    hash_file,
    list_checkpoints,
    new_name,
    newest_valid,
    parse_name,
    read_manifest,
    retain,
    verify,
    write_manifest,
)

NUM_SECTIONS = 2


def put_files(root: Path, step: int, generation: int = 0) -> Manifest:
    """Write the files of a checkpoint, not yet its manifest."""
    name = new_name(step, generation)
    (root / name).mkdir(parents=True)
    files = []
    for section in range(NUM_SECTIONS):
        path = root / name / f"section-{section}.safetensors"
        path.write_bytes(bytes([step, section]) * 50)
        tensor = TensorRecord(name="w", shape=(5, 5), dtype="float32")
        files.append(
            FileRecord(
                section=section,
                file=path.name,
                num_bytes=100,
                sha256=hash_file(path),
                tensors=(tensor,),
            )
        )
    return Manifest(
        name=name,
        step=step,
        num_sections=NUM_SECTIONS,
        model_fingerprint="m",
        config_fingerprint="c",
        seed=1,
        minibatch_size=16,
        microbatch_size=2,
        files=tuple(files),
    )


def put_checkpoint(root: Path, step: int, generation: int = 0) -> Manifest:
    manifest = put_files(root, step, generation)
    write_manifest(root, manifest)
    return manifest


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def test_a_manifest_reads_back_as_written(tmp_path: Path) -> None:
    manifest = put_checkpoint(tmp_path, 7, 3)
    assert read_manifest(tmp_path, manifest.name) == manifest
    assert manifest.files_of(1) == (manifest.files[1],)
    verify(tmp_path, manifest.name)


def test_names_are_never_the_same_and_tell_their_step() -> None:
    names = {new_name(12, 3) for _ in range(100)}
    assert len(names) == 100
    assert {parse_name(name) for name in names} == {(name, 12) for name in names}
    assert parse_name("step-12") is None
    assert parse_name("../step-1-g1-00000000") is None


def test_files_without_a_manifest_are_no_checkpoint(tmp_path: Path) -> None:
    old = put_checkpoint(tmp_path, 1)
    put_files(tmp_path, 2)
    assert list_checkpoints(tmp_path) == [(old.name, 1)]
    assert newest_valid(tmp_path) == (old.name, 1)


def test_a_manifest_that_was_never_renamed_does_not_count(tmp_path: Path) -> None:
    manifest = put_files(tmp_path, 2)
    temporary = tmp_path / manifest.name / f"{MANIFEST_FILE}.01234567"
    temporary.write_text(json.dumps(dataclasses.asdict(manifest)))
    assert list_checkpoints(tmp_path) == []
    write_manifest(tmp_path, manifest)
    assert list_checkpoints(tmp_path) == [(manifest.name, 2)]


def test_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    steps = [(3, 1), (20, 1), (20, 2), (4, 9)]
    names = {put_checkpoint(tmp_path, s, g).name: (s, g) for s, g in steps}
    (tmp_path / "notes").mkdir()
    listed = [names[entry.name] for entry in list_checkpoints(tmp_path)]
    assert listed == [(20, 2), (20, 1), (4, 9), (3, 1)]
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_a_complete_checkpoint_is_never_written_again(tmp_path: Path) -> None:
    manifest = put_checkpoint(tmp_path, 1)
    with pytest.raises(CheckpointError, match="is complete: use a new name"):
        write_manifest(tmp_path, manifest)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    manifest = put_files(tmp_path / "a", 1)
    with pytest.raises(CheckpointError, match=f"cannot write .*{manifest.name}"):
        write_manifest(tmp_path / "b", manifest)
    with pytest.raises(CheckpointError, match=r"cannot read .*manifest\.json"):
        read_manifest(tmp_path / "a", manifest.name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "section-1.safetensors is damaged: sha256"),
        (lambda path: path.write_bytes(b"x" * 99), "must be 100 bytes, got 99"),
        (Path.unlink, "cannot read .*section-1.safetensors: No such file"),
    ],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    old, new = put_checkpoint(tmp_path, 1), put_checkpoint(tmp_path, 2)
    damage(tmp_path / new.name / "section-1.safetensors")
    with pytest.raises(CheckpointError, match=message):
        verify(tmp_path, new.name)
    named: list[str] = []
    taken = newest_valid(tmp_path, on_damaged=lambda name, error: named.append(name))
    assert taken == (old.name, 1)
    assert named == [new.name]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema_version":9}', "\x00" * 64]
)
def test_a_damaged_manifest_is_named_and_skipped(tmp_path: Path, text: str) -> None:
    old, new = put_checkpoint(tmp_path, 1), put_checkpoint(tmp_path, 2)
    (tmp_path / new.name / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{new.name}/{MANIFEST_FILE}"):
        read_manifest(tmp_path, new.name)
    assert list_checkpoints(tmp_path) == [(old.name, 1)]
    named: list[str] = []
    assert newest_valid(tmp_path, on_damaged=lambda n, _: named.append(n)) == (
        old.name,
        1,
    )
    assert named == [new.name]


def test_a_manifest_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    one, two = put_checkpoint(tmp_path, 1), put_files(tmp_path, 2)
    text = (tmp_path / one.name / MANIFEST_FILE).read_text()
    (tmp_path / two.name / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="is of another checkpoint"):
        read_manifest(tmp_path, two.name)


def test_checkpoints_known_to_be_damaged_are_not_looked_at(tmp_path: Path) -> None:
    old, new = put_checkpoint(tmp_path, 1), put_checkpoint(tmp_path, 2)
    assert newest_valid(tmp_path, skip={new.name}) == (old.name, 1)
    assert newest_valid(tmp_path, skip={new.name, old.name}) is None


def test_a_manifest_must_add_up(tmp_path: Path) -> None:
    manifest = put_files(tmp_path, 1)
    with pytest.raises(WireError, match="must hold sections 0 to 1: got"):
        dataclasses.replace(manifest, files=manifest.files[:1])
    with pytest.raises(WireError, match="must be named step-2-g"):
        dataclasses.replace(manifest, step=2)
    with pytest.raises(WireError, match="file must be section-<k>"):
        dataclasses.replace(manifest.files[0], file="../../etc/passwd")


def test_retention_keeps_the_newest_and_what_is_protected(tmp_path: Path) -> None:
    names = [put_checkpoint(tmp_path, step).name for step in range(5)]
    assert set(retain(tmp_path, 2, protect={names[0]})) == {names[1], names[2]}
    kept = [entry.name for entry in list_checkpoints(tmp_path)]
    assert kept == [names[4], names[3], names[0]]
    assert retain(tmp_path, 2, protect={names[0]}) == ()


def test_retention_clears_stale_halves_but_none_that_may_be_in_writing(
    tmp_path: Path,
) -> None:
    stale, written = put_files(tmp_path, 1).name, put_files(tmp_path, 2).name
    newest = put_checkpoint(tmp_path, 3).name
    ahead = put_files(tmp_path, 4).name
    assert retain(tmp_path, 1, protect={written}) == (stale,)
    assert {path.name for path in tmp_path.iterdir()} == {written, newest, ahead}


def test_retention_without_a_complete_checkpoint_deletes_nothing(
    tmp_path: Path,
) -> None:
    name = put_files(tmp_path, 1).name
    assert retain(tmp_path, 1) == ()
    assert (tmp_path / name).is_dir()


def test_retention_follows_no_link_out_of_the_store(tmp_path: Path) -> None:
    outside = put_checkpoint(tmp_path / "outside", 1)
    root = tmp_path / "root"
    put_checkpoint(root, 5)
    (root / outside.name).symlink_to(tmp_path / "outside" / outside.name)
    assert retain(root, 1) == ()
    verify(tmp_path / "outside", outside.name)


def test_a_checkpoint_error_is_something_the_user_can_act_on() -> None:
    assert issubclass(CheckpointError, SpottrainError)
    assert CheckpointError.exit_code == 1
