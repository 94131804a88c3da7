"""Values of the command line are checked as if the job file had them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.config.overrides import overridden, read_overrides
from spottrain.varuna_manager.config.yaml_core import NO_LINES

JOB = """\
name: job
entrypoint: train:job
minibatch_size: 8
steps: 1
env: {LR: 0.1}
budget:
  max_usd: 5
aws:
  regions: [us-east-1]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def load(file: Path, *settings: str, **more: Any) -> Any:
    return load_config(file, overrides=read_overrides(settings, **more))


def test_options_replace_what_the_file_says(file: Path) -> None:
    config = load(
        file,
        "budget.max_usd=60",
        "budget.max_usd_per_hour=2",
        "aws.regions=[us-west-2, eu-west-1]",
        "slo.max_hours=1.5",
        env=["LR=1e-3", "NOTE=a=b"],
        name="other",
        steps=7,
    )
    assert (config.name, config.steps) == ("other", 7)
    assert (config.budget.max_usd, config.budget.max_usd_per_hour) == (60, 2)
    assert config.aws.regions == ("us-west-2", "eu-west-1")
    assert config.slo.max_hours == 1.5
    assert config.env == {"LR": "1e-3", "NOTE": "a=b"}


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("stepz=3", "job.yaml: stepz: unknown key; did you mean steps?"),
        ("steps=x", "job.yaml: steps: must be a valid integer: got 'x'"),
        ("budget.max_usd=-1", "job.yaml: budget.max_usd: must be greater than 0: got -1"),
        ("budget=", "job.yaml: budget: must be an object: got None"),
        ("aws.regions=[1]", "job.yaml: aws.regions[0]: must be a valid string: got 1"),
        ("env.B=$HOME", "job.yaml: env.B: variables are not expanded: got '$HOME'"),
    ],
)
def test_what_the_file_may_not_say_is_refused_and_its_place_named(
    file: Path, setting: str, error: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(file, setting)
    assert str(refused.value).startswith(error)
    assert " (not in the file)" in str(refused.value)


def test_the_lines_of_other_keys_are_still_named(file: Path) -> None:
    file.write_text(JOB.replace("minibatch_size: 8", "minibatch_size: x"))
    with pytest.raises(ConfigError, match=r"minibatch_size: .* \(line 3\)$"):
        load(file, "steps=3")


@pytest.mark.parametrize(
    ("settings", "more", "error"),
    [
        (["steps"], {}, "--set: must be KEY=VALUE, such as budget.max_usd=60: got 'steps'"),
        ([], {"env": ["=1"]}, "--env: must be KEY=VALUE"),
        (["steps=1"], {"steps": 2}, "steps: is given twice on the command line"),
        (["env.A=1"], {"env": ["A=2"]}, "env.A: is given twice on the command line"),
        (["steps=["], {}, r"steps: must be a plain value: got '\['"),
        (["name.first=a"], {}, "name.first: leads into a value that has no keys"),
    ],
)
def test_an_option_of_another_form_is_refused(
    file: Path, settings: list[str], more: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        load(file, *settings, **more)


KEYS = st.sampled_from("abc")
TREES: st.SearchStrategy[Any] = st.recursive(
    st.integers(), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


def at(data: Any, keys: list[str]) -> Any:
    for key in keys:
        data = data[key]
    return data


@given(data=st.dictionaries(KEYS, TREES), keys=st.lists(KEYS, min_size=1, max_size=3), value=TREES)
def test_one_value_is_replaced_and_nothing_else(data: Any, keys: list[str], value: Any) -> None:
    before = json.dumps(data)
    try:
        after, _ = overridden(data, NO_LINES, {".".join(keys): value}, "x")
    except ConfigError:
        inner = data
        for key in keys[:-1]:
            inner = inner.get(key, {})
            if not isinstance(inner, dict):
                return  # it led into a number
        raise
    finally:
        assert json.dumps(data) == before
    assert at(after, keys) == value
    for depth, key in enumerate(keys):
        try:
            old = at(data, keys[:depth])
        except KeyError:
            break
        new = at(after, keys[:depth])
        assert {k: v for k, v in old.items() if k != key} == {
            k: v for k, v in new.items() if k != key
        }


def test_a_number_for_env_stays_as_it_is_written() -> None:
    given = read_overrides(["env.PYTHON=3.10", "env.DEBUG=true", "budget.max_usd=3.10"])
    assert given == {"env.PYTHON": "3.10", "env.DEBUG": True, "budget.max_usd": 3.1}
