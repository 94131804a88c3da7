"""What programs read of an answer."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.varuna_manager.cli.console import show_json

NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
DOCUMENTS = st.recursive(NUMBERS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


def no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@given(DOCUMENTS)
def test_an_answer_is_json_whatever_is_in_it(document: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr("sys.stdout.write", written.append)
        show_json({"answer": document})
    read = json.loads("".join(written), parse_constant=no_json)["answer"]
    if not isinstance(document, float) or math.isfinite(document):
        assert type(read) is type(document)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_number_that_json_lacks_is_null(
    capsys: pytest.CaptureFixture[str], number: float
) -> None:
    show_json({"a": [1.5, (number,)], "b": number})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, [None]], "b": None}
