"""YAML 1.2, and the lines of values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.yaml_core import read_yaml

TEXT = st.text(st.characters(max_codepoint=0xD7FF), max_size=20)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *[(word, word) for word in ("yes", "no", "on", "off", "y", "N", "On")],
        *[(word, True) for word in ("true", "True", "TRUE")],
        *[(word, False) for word in ("false", "False", "FALSE")],
        *[(word, None) for word in ("null", "Null", "NULL", "~", "")],
        *[(text, text) for text in ("1:30", "12:30:45", "1:30.5", "-1:30", "190:20:30")],
        *[
            (text, text)
            for text in ("1_", "_1", "1__0", "0b11", "1,000", "-0x1F", "1e", "=", "0o8")
        ],
        *[(text, text) for text in ("2030-01-31", "2030-01-31T18:00:00Z")],
        *[
            ("010", 10),
            ("-007", -7),
            ("+12", 12),
            ("0o10", 8),
            ("0x1F", 31),
            ("10_000", 10_000),
        ],
        *[
            ("1e3", 1e3),
            (".5", 0.5),
            ("5.", 5.0),
            (".5e3", 500.0),
            ("1_000.5", 1000.5),
            ("-1.5E-3", -0.0015),
        ],
        *[(".inf", math.inf), ("-.Inf", -math.inf), ("+.INF", math.inf)],
        *[("'1'", "1"), ('"on"', "on"), ("|\n  1\n", "1\n")],
    ],
)
def test_a_scalar_means_what_the_core_schema_says(written: str, meant: Any) -> None:
    value = read_yaml(f"key: {written}")[0]["key"]
    assert value == meant
    assert type(value) is type(meant)


def test_not_a_number_is_a_number() -> None:
    assert math.isnan(read_yaml("a: .nan")[0]["a"])


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | TEXT,
        lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    )
)
def test_json_is_read_as_json(data: Any) -> None:
    assert read_yaml(json.dumps(data))[0] == data


@given(st.integers(0, 50), st.integers(0, 50))
def test_values_know_their_lines(before: int, between: int) -> None:
    text = "\n" * before + "a:\n" + "# none\n" * between + "- b: 1\n  c: [1,\n 2]\n"
    value, lines = read_yaml(text)
    assert value == {"a": [{"b": 1, "c": [1, 2]}]}
    first, item = before + 1, before + between + 2
    assert lines == {
        ("a",): first,
        ("a", 0): item,
        ("a", 0, "b"): item,
        ("a", 0, "c"): item + 1,
        ("a", 0, "c", 0): item + 1,
        ("a", 0, "c", 1): item + 2,
    }


def test_a_merged_mapping_gives_way_to_what_is_written_beside_it() -> None:
    text = "x: &x {a: 1, b: 1}\ny: &y {a: 2, c: 2}\nz:\n  a: 3\n  <<: [*x, *y]\n"
    value, lines = read_yaml(text)
    assert value["z"] == {"a": 3, "b": 1, "c": 2}
    assert lines["z", "a"] == 4
    with pytest.raises(ConfigError, match="line 1: << merges mappings"):
        read_yaml("<<: text")


def test_an_anchor_may_be_used_again() -> None:
    assert read_yaml("- &a 1\n- *a\n- &a 2\n- *a\n")[0] == [1, 1, 2, 2]


def _bomb(levels: int) -> str:
    """Return a few lines whose last stands for ten to the power of ``levels`` texts."""
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for n in range(1, levels):
        rows.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]")
    return "\n".join(rows) + "\n"


def test_aliases_that_stand_for_too_much_are_refused_before_they_are_written_out() -> None:
    with pytest.raises(ConfigError, match=r"line 5: aliases stand for more than 100,000"):
        read_yaml(_bomb(40))
    merged = "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 60))
    with pytest.raises(ConfigError, match="aliases stand for"):
        read_yaml("m0: &m0 {a: 1}\n" + merged)
    with pytest.raises(ConfigError, match="aliases stand for"):
        read_yaml(f"a: &a {'x' * 1000}\nb: [{', '.join(['*a'] * 200)}]\n")


def test_a_long_file_without_aliases_is_no_matter() -> None:
    assert len(read_yaml("- " + "x" * 200_000)[0][0]) == 200_000
    value, _ = read_yaml(_bomb(4))
    assert len(value["a3"]) == 10


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", 3),
        ("a:\n  b: 1\n  b: 2\n", 3),
        ("a: {b: 1,\n b: 2}", 2),
        ("a: 1\n---\nb: 1\n", 2),
        ("a: 1\nb: c: d\n", 2),
        ("a: 1\n\tb: 1\n", 2),
        ("a: 1\nb: *c\n", 2),
        ("a: 1\nb: !!python/name:os.system x\n", 2),
        ("a: 1\n[b]: 1\n", 2),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, line: int) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text)
    assert str(caught.value).startswith(f"line {line}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("written", ["3.10", "007", "1e-3", "1_0", "0x1f", "+5", ".inf"])
def test_a_number_of_env_stays_as_it_is_written(written: str) -> None:
    read, _ = read_yaml(f"env: {{A: {written}}}\nother: {{A: {written}}}")
    assert read["env"]["A"] == written
    assert isinstance(read["other"]["A"], int | float)
