from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.builders import a_manifest
from tests.checkpoints import newest_valid, verify

from spottrain import machine
from spottrain.manifest import (
    FROZEN_FOLDER,
    CheckpointError,
    FileRecord,
    Manifest,
    list_checkpoints,
    new_name,
    retain,
    write_manifest,
)
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.state.checkpoint import (
    Background,
    SectionCopies,
    SnapshotOutcome,
    load_section,
    save_frozen,
    save_section,
    state_name,
    write_snapshot,
)
from spottrain.storage.open import open_store
from spottrain.storage.store import Store

Tensors = dict[str, torch.Tensor]


def section_tensors(section: int, size: int = 64) -> Tensors:
    generator = torch.Generator().manual_seed(section)
    weight = torch.randn(size, 3, generator=generator)
    name = f"blocks.{section}.weight"
    return {
        name: weight,
        state_name(name, "exp_avg"): weight * 0.1,
        state_name(name, "step"): torch.tensor(7.0),
        f"blocks.{section}.half": weight.bfloat16(),
        f"blocks.{section}.none": torch.empty(0, 4),
    }


def complete(
    store: Store,
    name: str,
    files: list[FileRecord],
    frozen: tuple[FileRecord, ...] = (),
) -> Manifest:
    manifest = a_manifest(name, int(name.split("-")[1]), tuple(files), frozen=frozen)
    write_manifest(store, manifest)
    return manifest


def save(store: Store, step: int, num_sections: int = 2) -> Manifest:
    name = new_name(step, 1)
    files = [save_section(store, name, k, section_tensors(k)) for k in range(num_sections)]
    return complete(store, name, files)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_every_section_reads_back_bit_for_bit_whoever_asks(store: Store) -> None:
    manifest = save(store, 3, num_sections=5)
    verify(store, manifest.name)
    for section in (4, 0, 2):
        found = load_section(store, manifest, section)
        assert_equal(found, section_tensors(section))


def test_writing_into_loaded_tensors_leaves_the_checkpoint_as_it_is(
    store: Store,
) -> None:
    manifest = save(store, 1)
    for tensor in load_section(store, manifest, 0).values():
        tensor.add_(1)
    verify(store, manifest.name)


def test_a_file_is_never_written_twice(store: Store) -> None:
    save_section(store, "x", 0, section_tensors(0))
    with pytest.raises(CheckpointError, match=r"section-0\.safetensors exists"):
        save_section(store, "x", 0, section_tensors(0))


def flip_a_bit(store: Store, name: str) -> None:
    content = bytearray(store.get(name))
    content[-3] ^= 16
    store.put(name, bytes(content))


def test_a_tensor_may_not_come_twice(store: Store) -> None:
    name = new_name(1, 1)
    file = save_section(store, name, 0, section_tensors(0))
    frozen = save_frozen(store, 0, section_tensors(0))
    with pytest.raises(CheckpointError, match="is in two files"):
        load_section(store, complete(store, name, [file], frozen=(frozen,)), 0)


def test_frozen_tensors_are_written_once_for_all_checkpoints(store: Store) -> None:
    frozen, trained = {"frozen": torch.arange(5.0)}, section_tensors(0)
    records = [save_frozen(store, 0, frozen) for _ in range(2)]
    assert records[0] == records[1]
    for step in (1, 2):
        name = new_name(step, 1)
        file = save_section(store, name, 0, trained)
        manifest = complete(store, name, [file], frozen=(records[0],))
        assert_equal(load_section(store, manifest, 0), {**trained, **frozen})
    retain(store, keep=1)
    assert newest_valid(store) == (manifest.name, 2)
    flip_a_bit(store, f"{FROZEN_FOLDER}/{records[0].file}")
    with pytest.raises(CheckpointError, match="frozen/section-0-"):
        load_section(store, manifest, 0)
    assert newest_valid(store) is None


def test_a_section_may_hold_nothing_that_is_trained(store: Store) -> None:
    name = new_name(1, 1)
    record = save_frozen(store, 0, {"frozen": torch.ones(2)})
    manifest = complete(store, name, [save_section(store, name, 0, {})], frozen=(record,))
    assert_equal(load_section(store, manifest, 0), {"frozen": torch.ones(2)})


def test_a_process_killed_between_files_and_manifest_leaves_the_one_before(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    old = save(store, 1)
    killed = textwrap.dedent(
        """
        import os, signal, sys, torch
        from spottrain.pipeline.state.checkpoint import save_section
        from spottrain.storage.open import open_store
        save_section(open_store(sys.argv[1]), sys.argv[2], 0, {"w": torch.ones(9)})
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    name = new_name(2, 1)
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path), name], check=False)
    assert done.returncode == -9
    assert (tmp_path / name / "section-0.safetensors").exists()
    assert list_checkpoints(store) == [(old.name, 1)]
    assert newest_valid(store) == (old.name, 1)


# --- Snapshots ------------------------------------------------------------------------------


def snapshot(store: Store, name: str, sections: dict[int, Tensors]) -> SnapshotOutcome:
    return write_snapshot(store, "", name, sections.items(), threading.Event())


def test_a_snapshot_is_what_the_manifest_must_say_of_it(store: Store) -> None:
    name = new_name(4, 1)
    outcome = snapshot(store, name, {k: section_tensors(k) for k in (1, 0)})
    assert outcome.error == ""
    manifest = complete(store, name, list(outcome.files))
    assert_equal(load_section(store, manifest, 1), section_tensors(1))


def test_an_abandoned_snapshot_writes_no_further_file(store: Store) -> None:
    name, abandoned = new_name(4, 1), threading.Event()
    abandoned.set()
    outcome = write_snapshot(store, "", name, [(0, section_tensors(0))], abandoned)
    assert outcome == SnapshotOutcome(error="it was abandoned")
    assert store.list(name) == []


def test_a_thread_knows_which_of_its_tasks_are_unfinished() -> None:
    thread, goes_on = Background(), threading.Event()
    task = thread.submit(goes_on.wait, 600)
    assert [*thread.unfinished] == [task]
    goes_on.set()
    thread.submit(bool).result()
    assert [*thread.unfinished] == []


def test_trouble_with_a_snapshot_is_an_outcome(tmp_path: Path) -> None:
    bad = new_name(1, 1)
    (tmp_path / bad).write_text("a file where a folder must be")
    failed = snapshot(open_store(tmp_path), bad, {0: section_tensors(0)})
    assert failed.error.startswith(f"cannot write {tmp_path / bad}")
    assert failed.files == ()


def test_a_full_disk_is_an_outcome_and_the_checkpoint_before_stays(
    small_disk: Path,
) -> None:
    store = open_store(small_disk)
    old, name = save(store, 1), new_name(2, 1)
    outcome = snapshot(store, name, {0: section_tensors(0), 1: section_tensors(1, 100_000)})
    assert outcome.files == ()
    assert os.strerror(errno.ENOSPC) in outcome.error
    assert "\n" not in outcome.error
    assert newest_valid(store) == (old.name, 1)
    assert_equal(load_section(store, old, 1), section_tensors(1))


def test_a_manifest_that_finds_no_room_is_an_error_of_one_line(
    small_disk: Path,
) -> None:
    store = open_store(small_disk)
    old, name = save(store, 1), new_name(2, 1)
    files = [save_section(store, name, 0, section_tensors(0))]
    room = os.statvfs(small_disk)
    (small_disk / "fill").write_bytes(b"0" * room.f_bavail * room.f_bsize)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
        complete(store, name, files)
    assert newest_valid(store) == (old.name, 1)


# --- Copies ---------------------------------------------------------------------------------

SECTIONS, SECTION_BYTES = 5, 4000


@pytest.fixture
def copier() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def begin_to_copy(
    copier: ThreadPoolExecutor, tracker: TensorTracker
) -> tuple[SectionCopies, dict[int, dict[str, torch.Tensor]]]:
    """Return copies of sections that hold their numbers, and these sections."""
    sections = {k: {"w": torch.full((SECTION_BYTES // 4,), float(k))} for k in range(SECTIONS)}
    beside = copier, tracker, threading.Event()
    return SectionCopies(HostDevice(), HostDevice(), sections, *beside), sections


def are_as_they_were(copies: SectionCopies) -> None:
    found = 0
    for section, tensors in copies:
        assert (tensors["w"] == section).all()
        del tensors
        found += 1
    assert found == SECTIONS


def test_copies_are_made_before_any_is_written_where_there_is_memory(
    copier: ThreadPoolExecutor,
) -> None:
    tracker = TensorTracker(0)
    copies, sections = begin_to_copy(copier, tracker)
    copies.finish()
    for tensors in sections.values():
        tensors["w"].zero_()
    are_as_they_were(copies)
    assert tracker.peak_bytes == SECTIONS * SECTION_BYTES


def test_a_copy_waits_until_the_one_before_is_written_where_memory_is_short(
    copier: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 0)
    tracker = TensorTracker(0)
    copies, _ = begin_to_copy(copier, tracker)
    are_as_they_were(copies)
    assert tracker.peak_bytes == SECTION_BYTES


def test_copies_that_nobody_asks_for_hold_up_nothing(
    copier: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 0)
    copies, _ = begin_to_copy(copier, TensorTracker(0))
    copies.drop()
    copies.finish()
