from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_manifest
from tests.checkpoints import newest_valid, verify
from tests.fakes.object_store import S3

from spottrain.errors import WireError
from spottrain.manifest import (
    MANIFEST_FILE,
    OWNER_FILE,
    CheckpointError,
    DamagedError,
    FileRecord,
    Manifest,
    Owner,
    config_fingerprint,
    list_checkpoints,
    misfit,
    new_name,
    own_uids,
    parse_name,
    read_manifest,
    recheck,
    retain,
    scan,
    write_manifest,
    write_owner,
)
from spottrain.storage.open import open_store
from spottrain.storage.store import (
    DeniedError,
    ExistsError,
    Store,
    UnreachableError,
)
from spottrain.wire.messages import CheckpointDamaged, JobSpec
from spottrain.wire.numerics import Numerics

NUM_SECTIONS = 2


def put_files(store: Store, step: int, generation: int = 0, uid: str = "") -> Manifest:
    """Write the files of a checkpoint, not yet its manifest."""
    name = new_name(step, generation)
    files = []
    for section in range(NUM_SECTIONS):
        file, data = f"section-{section}.safetensors", bytes([step, section]) * 50
        store.put(f"{name}/{file}", data)
        files.append(
            FileRecord(
                section=section,
                file=file,
                num_bytes=100,
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
    return a_manifest(name, step, tuple(files), uid=uid)


def put_checkpoint(store: Store, step: int, generation: int = 0, uid: str = "") -> Manifest:
    manifest = put_files(store, step, generation, uid)
    write_manifest(store, manifest)
    return manifest


def flip_a_bit(store: Store, name: str) -> None:
    content = bytearray(store.get(name))
    content[7] ^= 1
    store.put(name, bytes(content))


def shorten(store: Store, name: str) -> None:
    store.put(name, store.get(name)[:-1])


def remove(store: Store, name: str) -> None:
    store.delete([name])


def test_a_manifest_reads_back_as_written(store: Store) -> None:
    manifest = put_checkpoint(store, 7, 3)
    assert read_manifest(store, manifest.name) == manifest
    assert list(manifest.files_of(1)) == [(manifest.name, manifest.files[1])]
    verify(store, manifest.name)


def test_names_are_unique_and_contain_their_step() -> None:
    names = {new_name(12, 3) for _ in range(100)}
    assert len(names) == 100
    assert {parse_name(name) for name in names} == {(name, 12) for name in names}
    assert parse_name("step-12") is None
    assert parse_name("../step-1-g1-00000000") is None


def test_files_without_a_manifest_are_no_checkpoint(store: Store) -> None:
    old = put_checkpoint(store, 1)
    put_files(store, 2)
    assert list_checkpoints(store) == [(old.name, 1)]
    assert newest_valid(store) == (old.name, 1)


def damaged_manifests() -> dict[str, str]:
    """Return manifests that were damaged into something that is hard to read."""
    name = "step-{}-g1-00000000"
    return {
        name.format(step): text
        for step, text in enumerate(
            (
                "[" * 100_000,
                '{"name":' * 5000,
                '{"num_sections": 4000000000}',
                '{"name": "step-' + "9" * 5000 + '-g1-00000000"}',
                '{"seed": ' + "9" * 5000 + "}",
                '{"step": 1e999}',
                "\0\0\0",
                "",
                "[]",
                '{"schema_version": 9}',
            )
        )
    }


def test_a_damaged_manifest_is_passed_over(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    whole = put_checkpoint(store, 100)
    fields = dataclasses.asdict(whole)
    for name, text in damaged_manifests().items():
        if text.startswith('{"') and text.endswith("}"):
            data = {**fields, "name": name, "step": int(name.split("-")[1])}
            changed = json.dumps(data).removesuffix("}")
            text = f"{changed}, {text.removeprefix('{')}"  # the last of two keys counts
        store.put(f"{name}/{MANIFEST_FILE}", text.encode())
        with pytest.raises(DamagedError, match=rf"{name}/{MANIFEST_FILE} is damaged"):
            read_manifest(store, name)

    assert list_checkpoints(store) == [(whole.name, 100)]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**17, 10**21)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(data=st.data())
def test_whatever_is_in_a_manifest_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = open_store(tmp_path_factory.mktemp("store"))
    document = json.loads(json.dumps(dataclasses.asdict(put_files(store, 1))))
    place: Any = document
    keys = list(document)
    while True:
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
    place[key] = data.draw(JSON)
    store.put(f"step-1-g0-00000000/{MANIFEST_FILE}", json.dumps(document).encode())

    with contextlib.suppress(CheckpointError):
        read_manifest(store, "step-1-g0-00000000")


def test_checkpoints_are_listed_newest_first(store: Store) -> None:
    steps = [(3, 1), (20, 1), (20, 2), (4, 9)]
    names = {put_checkpoint(store, s, g).name: (s, g) for s, g in steps}
    store.put("notes/of-mine.txt", b"")
    listed = [names[entry.name] for entry in list_checkpoints(store)]
    assert listed == [(20, 2), (20, 1), (4, 9), (3, 1)]


def test_a_complete_checkpoint_is_never_written_again(store: Store) -> None:
    manifest = put_checkpoint(store, 1)
    other = dataclasses.replace(manifest, seed=2)
    with pytest.raises(CheckpointError, match="is complete: use a new name"):
        write_manifest(store, other)


def test_a_manifest_whose_reply_was_lost_may_be_put_again(store: Store) -> None:
    manifest = put_checkpoint(store, 1)
    write_manifest(store, manifest)
    assert list_checkpoints(store) == [(manifest.name, 1)]


def test_an_empty_store_holds_no_checkpoint(store: Store) -> None:
    assert list_checkpoints(store) == []
    assert newest_valid(store) is None
    name = put_files(store, 1).name
    with pytest.raises(CheckpointError, match=rf"cannot read .*{name}/manifest\.json"):
        read_manifest(store, name)


def test_a_store_that_is_down_is_not_taken_for_empty_or_damaged(s3: S3, tmp_path: Path) -> None:
    manifest = put_checkpoint(open_store(tmp_path), 1)
    down = open_store("s3://gone/x?endpoint_url=http://127.0.0.1:9", patience_s=0.1)
    for ask in (
        lambda: list_checkpoints(down),
        lambda: retain(down, 1),
        lambda: verify(down, new_name(1, 1)),
    ):
        with pytest.raises(UnreachableError, match=r"s3://gone/x.*: no answer"):
            ask()
    with pytest.raises(CheckpointError, match=r"cannot write s3://gone/x/.*no answer"):
        write_manifest(down, manifest)


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (flip_a_bit, DamagedError, "section-1.safetensors is damaged: sha256"),
        (shorten, DamagedError, "must be 100 bytes, got 99"),
        (remove, CheckpointError, "cannot read .*section-1.safetensors"),
    ],
)
def test_only_what_is_there_and_not_as_it_was_written_is_damaged(
    store: Store,
    damage: Callable[[Store, str], None],
    kind: type[CheckpointError],
    message: str,
) -> None:
    old, new = put_checkpoint(store, 1), put_checkpoint(store, 2)
    damage(store, f"{new.name}/section-1.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        verify(store, new.name)
    assert type(caught.value) is kind
    assert newest_valid(store) == (old.name, 1)


def test_a_manifest_of_another_checkpoint_is_refused(store: Store) -> None:
    one, two = put_checkpoint(store, 1), put_files(store, 2)
    data = store.get(f"{one.name}/{MANIFEST_FILE}")
    store.put(f"{two.name}/{MANIFEST_FILE}", data)
    with pytest.raises(CheckpointError, match="is of another checkpoint"):
        read_manifest(store, two.name)


def test_a_manifest_must_add_up(store: Store) -> None:
    manifest = put_files(store, 1)
    with pytest.raises(WireError, match="must hold sections 0 to 1: got"):
        dataclasses.replace(manifest, files=manifest.files[:1])
    with pytest.raises(WireError, match="must be named step-2-g"):
        dataclasses.replace(manifest, step=2)
    with pytest.raises(WireError, match="file must be section-<k>"):
        dataclasses.replace(manifest.files[0], file="../../etc/passwd")


def test_retention_keeps_the_newest_and_what_is_protected(store: Store) -> None:
    names = [put_checkpoint(store, step).name for step in range(5)]
    assert set(retain(store, 2, protect={names[0]})) == {names[1], names[2]}
    kept = [entry.name for entry in list_checkpoints(store)]
    assert kept == [names[4], names[3], names[0]]
    assert retain(store, 2, protect={names[0]}) == ()


def test_retention_clears_stale_halves_but_none_that_may_be_in_writing(
    store: Store,
) -> None:
    stale, written = put_files(store, 1).name, put_files(store, 2).name
    newest = put_checkpoint(store, 3).name
    ahead = put_files(store, 4).name
    assert retain(store, 1, protect={written}) == (stale,)
    assert set(store.folders()) == {written, newest, ahead}


def test_retention_without_a_complete_checkpoint_deletes_nothing(
    store: Store,
) -> None:
    name = put_files(store, 1).name
    assert retain(store, 1) == ()
    assert store.folders() == [name]


def test_retention_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    outside, store = open_store(tmp_path / "outside"), open_store(tmp_path / "root")
    manifest = put_checkpoint(outside, 1)
    put_checkpoint(store, 5)
    link = tmp_path / "root" / manifest.name
    link.symlink_to(tmp_path / "outside" / manifest.name)
    assert retain(store, 1) == ()
    verify(outside, manifest.name)


# --- Absence, refusal and damage ---------------------------------------------------------


def report_of(name: str, file: str) -> CheckpointDamaged:
    return CheckpointDamaged(name=name, file=f"{name}/{file}", reason="as a VM says")


@pytest.mark.parametrize("function", ["stat", "open", "scandir"])
def test_a_file_system_that_fails_is_not_taken_for_damage_or_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    store = open_store(tmp_path)
    manifest = put_checkpoint(store, 1)

    def fails(*_: object, **__: object) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def look() -> None:
        scan(store)
        verify(store, manifest.name)

    look()
    module = io if function == "open" else os
    monkeypatch.setattr(module, function, fails)
    with pytest.raises(UnreachableError):
        look()


def test_a_folder_that_may_not_be_read_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    put_checkpoint(store, 1)

    def fails(*_: object, **__: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(DeniedError, match="Permission denied"):
        scan(store)


def test_a_checkpoint_counts_as_whole_with_all_files_in_their_sizes(
    store: Store,
) -> None:
    whole, short, lacks, torn = (put_checkpoint(store, step) for step in (1, 2, 3, 4))
    shorten(store, f"{short.name}/section-0.safetensors")
    remove(store, f"{lacks.name}/section-1.safetensors")
    shorten(store, f"{torn.name}/{MANIFEST_FILE}")
    found = scan(store)
    assert [entry.name for entry in found.whole] == [whole.name]
    assert [one.name for one in found.damaged] == [torn.name, lacks.name, short.name]
    assert "section-1.safetensors is missing" in found.damaged[1].reason


def test_what_is_not_whole_never_makes_retention_delete_what_is(store: Store) -> None:
    whole, lacks = put_checkpoint(store, 1), put_checkpoint(store, 2)
    remove(store, f"{lacks.name}/section-1.safetensors")
    assert retain(store, 1) == ()
    verify(store, whole.name)


def test_what_was_called_damaged_is_read_again(store: Store) -> None:
    name, file = put_checkpoint(store, 1).name, "section-1.safetensors"
    assert recheck(store, report_of(name, file)) is None
    before = store.get(f"{name}/{file}")
    flip_a_bit(store, f"{name}/{file}")
    assert scan(store).damaged == [], "sizes do not show it"
    found = recheck(store, report_of(name, file))
    assert found is not None
    assert "sha256" in found.reason
    assert recheck(store, found) is not None
    store.put(f"{name}/{file}", before)
    assert recheck(store, found) is None
    assert recheck(store, report_of(new_name(9, 9), file)) is None, "it is gone"


# --- Whose it is -------------------------------------------------------------------------


def test_a_store_is_marked_once_and_tells_whose_it_is(store: Store) -> None:
    mine = Owner(uid="a", name="first", adopted=("z",))
    with pytest.raises(UnreachableError, match="mount or restore"):
        own_uids(store, "a")
    write_owner(store, mine)
    write_owner(store, mine)  # as after a lost answer
    assert own_uids(store, "a") == frozenset({"a", "z"})
    assert own_uids(store, "") is None, "a job from before there were marks"
    with pytest.raises(ExistsError):
        write_owner(store, Owner(uid="b", name="second"))
    with pytest.raises(DeniedError, match="belongs to job first"):
        own_uids(store, "b")
    store.put(OWNER_FILE, b"{")
    with pytest.raises(DeniedError, match="damaged"):
        own_uids(store, "a")


def test_checkpoints_of_other_jobs_are_neither_listed_nor_deleted(store: Store) -> None:
    others = [put_checkpoint(store, step, uid="b").name for step in (1, 200)]
    unmarked = put_checkpoint(store, 5).name
    mine = [put_checkpoint(store, step, uid="a").name for step in (2, 3, 4)]
    assert [one.name for one in list_checkpoints(store, {"a"})] == mine[::-1]
    found = scan(store, {"a"})
    assert [entry.name for entry in found.whole] == mine[::-1]
    assert found.foreign == {*others, unmarked}
    assert set(retain(store, 1, uids={"a"})) == set(mine[:2])
    assert set(store.folders()) == {*others, unmarked, mine[2]}


SPEC = JobSpec(
    name="job",
    entrypoint="a:b",
    seed=1,
    steps=9,
    minibatch_size=8,
    microbatch_size=4,
    reduction="exact",
    checkpoint_path="/x",
    checkpoint_every_steps=1,
    checkpoint_keep=1,
    lease_s=1.0,
    heartbeat_s=1.0,
)


@pytest.mark.parametrize(
    ("change", "models", "says"),
    [
        ({}, "model", ""),
        ({"steps": 3, "name": "other", "microbatch_size": 8}, "model", ""),
        ({}, "other", "another model"),
        ({"seed": 2}, "model", "seed: 1"),
        ({"minibatch_size": 16}, "model", "minibatch_size: 8"),
        ({"reduction": "fast"}, "model", "reduction"),
        ({"init_from": "ab"}, "model", "init_from"),
        ({"sequence_parallel": True}, "model", "sequence_parallel"),
        ({"reduction": "fast", "sequence_parallel": True}, "model", "reduction"),
    ],
)
def test_a_job_goes_on_only_from_checkpoints_of_the_same_model_and_settings(
    tmp_path: Path, change: dict[str, Any], models: str, says: str
) -> None:
    manifest = dataclasses.replace(
        put_files(open_store(tmp_path), 1),
        config_fingerprint=config_fingerprint(SPEC),
    )
    found = misfit(manifest, dataclasses.replace(SPEC, **change), {models}, None)
    assert says in found
    assert bool(found) is bool(says)


SETTLED = Numerics(microbatch_size=2, tensor_parallel=1, state="device", kernels="A")


@pytest.mark.parametrize(
    ("saved", "asked", "says"),
    [
        (SETTLED, SETTLED, ""),
        (SETTLED, Numerics(), ""),
        (SETTLED, None, ""),
        (None, SETTLED, ""),
        (SETTLED, Numerics(microbatch_size=4), "a job with microbatch_size: 2"),
        (SETTLED, Numerics(tensor_parallel=2), "a job with runtime.tensor_parallel: 1"),
        (SETTLED, Numerics(state="host"), "a job with runtime.state: device"),
        (SETTLED, Numerics(kernels="B"), "a job with VMs that compute on A"),
    ],
)
def test_where_bits_depend_on_it_a_job_computes_as_its_checkpoint_says(
    tmp_path: Path, saved: Numerics | None, asked: Numerics | None, says: str
) -> None:
    manifest = dataclasses.replace(
        put_files(open_store(tmp_path), 1),
        config_fingerprint=config_fingerprint(SPEC),
        numerics=saved,
    )
    assert misfit(manifest, SPEC, {manifest.model_fingerprint}, asked) == says
