"""Whose the checkpoints at a place are."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from spottrain.errors import ConfigError
from spottrain.manifest import (
    OWNER_FILE,
    FileRecord,
    Manifest,
    config_fingerprint,
    own_uids,
    read_owner,
    write_manifest,
)
from spottrain.storage.open import open_store
from spottrain.varuna_manager.config.job import parse_config
from spottrain.varuna_manager.launch import ownership
from spottrain.wire.numerics import Numerics

CONFIG = {"name": "a", "entrypoint": "a:b", "minibatch_size": 8, "steps": 9}
SPEC = parse_config(CONFIG, "job.yaml").job_spec("/place")


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "place")


def save(place: str, step: int, uid: str, numerics: Numerics | None = None) -> None:
    """Write the manifest of a checkpoint of the job."""
    file = FileRecord(section=0, file="section-0.safetensors", num_bytes=0, sha256="")
    manifest = Manifest(
        name=f"step-{step}-g1-00000000",
        step=step,
        num_sections=1,
        model_fingerprint="m",
        config_fingerprint=config_fingerprint(SPEC),
        seed=SPEC.seed,
        minibatch_size=SPEC.minibatch_size,
        files=(file,),
        uid=uid,
        numerics=numerics,
    )
    write_manifest(open_store(place), manifest)


def begin(place: str, uid: str, *, adopt: bool = False, seed: int = SPEC.seed) -> None:
    spec = dataclasses.replace(SPEC, name=f"job-{uid}", seed=seed)
    with ownership.marked(place, uid, spec, "m", Numerics(), adopt=adopt):
        pass


def test_a_place_that_is_marked_or_holds_checkpoints_is_refused(place: str) -> None:
    begin(place, "a")
    with pytest.raises(ConfigError, match="job-a"):
        begin(place, "b")
    save(place, 5, "a")
    with pytest.raises(ConfigError, match="--adopt"):
        begin(place, "b")
    open_store(place).delete([OWNER_FILE])  # as jobs were before there were marks
    with pytest.raises(ConfigError, match="step-5"):
        begin(place, "b")
    assert read_owner(open_store(place)) is None


def test_a_job_that_adopts_a_place_owns_what_its_owners_have_saved(place: str) -> None:
    begin(place, "a")
    save(place, 5, "a")
    save(place, 10**9, "stranger")
    begin(place, "b", adopt=True)
    begin(place, "c", adopt=True)
    assert own_uids(open_store(place), "c") == frozenset("abc")


def test_a_place_that_nobody_has_marked_is_adopted_as_a_whole(place: str) -> None:
    save(place, 5, "")
    begin(place, "b", adopt=True)
    assert own_uids(open_store(place), "b") == frozenset(("b", ""))


def test_checkpoints_of_other_settings_are_not_adopted(place: str) -> None:
    begin(place, "a")
    save(place, 5, "a")
    with pytest.raises(ConfigError, match="seed"):
        begin(place, "b", adopt=True, seed=SPEC.seed + 1)
    assert own_uids(open_store(place), "a") == frozenset("a")


SETTLED = Numerics(microbatch_size=2, tensor_parallel=2, state="device", kernels="A")


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        (Numerics(), ""),
        (SETTLED, ""),
        (Numerics(microbatch_size=4), "microbatch_size: 2"),
        (Numerics(tensor_parallel=1), "runtime.tensor_parallel: 2"),
        (Numerics(state="host"), "runtime.state: device"),
    ],
)
def test_a_job_computes_as_the_checkpoints_that_it_adopts_say(
    place: str, asked: Numerics, refused: str
) -> None:
    begin(place, "a")
    save(place, 5, "a", numerics=SETTLED)
    with contextlib.ExitStack() as stack:
        if refused:
            stack.enter_context(pytest.raises(ConfigError, match=refused))
        mark = ownership.marked(place, "b", SPEC, "m", asked, adopt=True)
        assert stack.enter_context(mark) == SETTLED


@pytest.mark.parametrize("adopt", [False, True])
def test_a_launch_that_fails_leaves_the_place_as_it_was(place: str, adopt: bool) -> None:
    if adopt:
        begin(place, "a")
    before = read_owner(open_store(place))
    with (
        pytest.raises(RuntimeError),
        ownership.marked(place, "b", SPEC, "m", Numerics(), adopt=adopt),
    ):
        raise RuntimeError
    assert read_owner(open_store(place)) == before


def test_the_mark_of_a_job_that_is_not_begun_is_taken_back(place: str) -> None:
    begin(place, "a")
    ownership.unmark(place, "b")
    assert read_owner(open_store(place)) is not None
    ownership.unmark(place, "a")
    assert read_owner(open_store(place)) is None
