"""Profiles on disk: kept, found again, read, refused by name."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_spec
from tests.unit.varuna_manager.story import FACTS, PROFILE

from spottrain.errors import ConfigError
from spottrain.morphing.plan.profiles import BETWEEN_AS_WITHIN
from spottrain.varuna_manager.config.job import parse_config
from spottrain.varuna_manager.jobs import profiles
from spottrain.wire.model import LoaderSpec, Profile

HERE = PROFILE.device, PROFILE.software
SPEC = a_spec()


def keep(profile: Profile, measured_at_s: float) -> None:
    profiles.keep(profile)
    os.utime(profiles.path_of(profile), (measured_at_s, measured_at_s))


def test_what_was_kept_is_found_for_the_same_model_device_and_software() -> None:
    keep(PROFILE, 1000.0)

    known = profiles.find(FACTS, SPEC, *HERE, (1,))

    assert known is not None
    assert (known.profile, known.measured_at_s) == (PROFILE, 1000.0)
    assert profiles.find(replace(FACTS, fingerprint="other"), SPEC, *HERE, (1,)) is None
    assert profiles.find(FACTS, SPEC, "other", HERE[1], (1,)) is None
    assert profiles.find(FACTS, SPEC, HERE[0], "other", (1,)) is None
    assert profiles.find(FACTS, SPEC, *HERE, (1, 2)) is None


def test_the_newest_comes_first() -> None:
    older = replace(PROFILE, device="older")
    keep(PROFILE, 2000.0)
    keep(older, 1000.0)

    known = profiles.known_profiles(FACTS, SPEC)

    assert [one.profile for one in known] == [PROFILE, older]


@pytest.mark.parametrize(
    "condition",
    [{"loader": LoaderSpec(workers=2)}, {"precision": "bf16"}, {"selective_recompute": True}],
    ids=str,
)
def test_a_profile_serves_jobs_under_the_same_conditions_only(condition: dict[str, Any]) -> None:
    other = replace(PROFILE, **condition)
    keep(PROFILE, 2000.0)
    keep(other, 1000.0)

    for profile, spec in ((PROFILE, SPEC), (other, replace(SPEC, **condition))):
        (known,) = profiles.known_profiles(FACTS, spec)
        assert known.profile == profile


def test_measuring_again_takes_the_place_of_what_was_kept() -> None:
    keep(PROFILE, 1000.0)
    keep(replace(PROFILE, task_overhead_s=1.0), 2000.0)

    (known,) = profiles.known_profiles(FACTS, SPEC)

    assert known.profile.task_overhead_s == 1.0


def test_links_that_were_assumed_are_no_use_later() -> None:
    keep(replace(PROFILE, sources=(BETWEEN_AS_WITHIN,)), 1000.0)

    assert profiles.find(FACTS, SPEC, *HERE, (1,)) is None


def test_a_damaged_file_is_reported_and_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keep(PROFILE, 1000.0)
    profiles.path_of(PROFILE).write_text("{")

    with caplog.at_level(logging.WARNING):
        assert profiles.known_profiles(FACTS, SPEC) == ()

    assert "JSON" in caplog.text


def test_a_profile_is_written_for_people_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"

    profiles.write_profile(path, PROFILE)

    assert profiles.read_profile(path, FACTS) == PROFILE
    assert path.read_text().startswith('{\n  "fingerprint": "model",\n')
    assert json.loads(path.read_text())["schema_version"] == 1


def changed(folder: Path, key: str, value: object) -> Path:
    data = json.loads(profiles.to_text(PROFILE))
    data["microbatches"][0]["sections"][1][key] = value
    path = folder / "a.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (0.0, "must be above 0: got 0.0"),
        (-1.0, "must be above 0: got -1.0"),
        (float("nan"), "must be above 0: got nan"),
        ("fast", "must be float: got 'fast'"),
    ],
)
def test_a_bad_time_is_refused_with_file_field_and_value(
    tmp_path: Path, value: object, what: str
) -> None:
    path = changed(tmp_path, "forward_s", value)

    with pytest.raises(ConfigError) as refusal:
        profiles.read_profile(path)

    text = str(refusal.value)
    assert text.startswith(str(path))
    assert "microbatches[0].sections[1].forward_s" in text
    assert what in text


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such profile"):
        profiles.read_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="extra is not a field of SectionProfile"):
        profiles.read_profile(changed(tmp_path, "extra", 1))
    with pytest.raises(ConfigError, match=f"{tmp_path}.*cannot be read"):
        profiles.read_profile(tmp_path)


def job(path: Path, **changes: object) -> str:
    data = {
        "name": "demo",
        "entrypoint": "train:job",
        "minibatch_size": 8,
        "steps": 1,
        "profile": str(path),
    }
    return json.dumps({**data, **changes})


def test_the_job_files_profile_must_fit_the_model_and_the_micro_batch(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.json"
    profiles.write_profile(path, PROFILE)
    config = parse_config(json.loads(job(path)), "job.yaml")

    assert profiles.given_profile(config, FACTS) == PROFILE
    with pytest.raises(ConfigError, match=f"{path}: fingerprint "):
        profiles.given_profile(config, replace(FACTS, fingerprint="other"))
    loads_2 = parse_config(json.loads(job(path, loader={"workers": 2})), "job.yaml")
    measured = replace(PROFILE, origin="measured")
    profiles.write_profile(path, measured)
    with pytest.raises(ConfigError, match=r"job, \{workers: 2, ahead: 4\}: got \{workers"):
        profiles.given_profile(loads_2, FACTS)
    assert profiles.given_profile(config, FACTS) == measured
    wants_2 = parse_config(json.loads(job(path, microbatch_size=2)), "job.yaml")
    with pytest.raises(ConfigError, match="include microbatch_size 2"):
        profiles.given_profile(wants_2, FACTS)


def test_sizes_to_measure_are_powers_of_two_that_divide_the_mini_batch() -> None:
    def sizes(**changes: object) -> tuple[int, ...]:
        data = json.loads(job(Path("a.json"), **changes))
        return parse_config(data, "job.yaml").microbatch_sizes

    assert sizes(minibatch_size=64) == (1, 2, 4, 8, 16)
    assert sizes(minibatch_size=12) == (1, 2, 4)
    assert sizes(minibatch_size=9) == (1, 3)
    assert sizes(minibatch_size=12, microbatch_size=6) == (6,)
