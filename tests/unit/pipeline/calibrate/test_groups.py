"""Which ranks measure sections together, and which sections."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders import section_profile, slots_of
from tests.gpu import runs

from spottrain.pipeline.calibrate.groups import groups_of, representatives
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.wire.plan import Slot


@pytest.mark.parametrize(
    ("names", "size", "groups"),
    [
        ("aabb", 2, ((0, 1),)),
        ("aabbbb", 2, ((2, 3), (4, 5))),
        ("aabbbb", 4, ((2, 3, 4, 5),)),
        ("aaab", 2, ((0, 1),)),
        ("aaab", 4, ()),
        ("ab", 2, ()),
    ],
)
def test_groups_are_those_of_the_vm_with_the_most_slots(
    names: str, size: int, groups: tuple[tuple[int, ...], ...]
) -> None:
    assert groups_of(slots_of(names), size) == groups


def test_a_slots_second_process_is_in_no_group() -> None:
    slot = Slot(vm_id="a", index=0)
    assert groups_of((slot, slot), 2) == ()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> LoadedJob:
    return load(runs.job_spec(tmp_path_factory.mktemp("job"), "deep"), Path(runs.WORKDIR))


def test_of_sections_that_are_alike_one_of_middling_speed_is_measured(deep: LoadedJob) -> None:
    count = deep.layout.num_sections
    sections = [section_profile(k, forward_s=1.0 + k) for k in range(count)]
    chosen = representatives(deep, sections, preferred=range(count))
    kinds = {k: tuple((spec.shape, spec.dtype) for spec in deep.specs[k]) for k in range(count)}

    assert set(chosen) == set(range(count))
    assert len(set(chosen.values())) == len(set(kinds.values())) < count
    for section, other in chosen.items():
        alike = [k for k in range(count) if kinds[k] == kinds[section]]
        assert other == alike[len(alike) // 2]
        assert chosen[other] == other

    saves_more = [*sections[:-2], section_profile(count - 2, saved_bytes=9), sections[-1]]
    assert representatives(deep, saves_more, range(count))[count - 2] == count - 2
    (near, *_) = [k for k in range(count) if chosen[k] != k]
    assert representatives(deep, sections, [near])[chosen[near]] == near
