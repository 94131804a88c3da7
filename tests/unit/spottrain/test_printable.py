from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.printable import printable, printable_data

ANY = st.text(st.characters() | st.sampled_from("\x1b[]m;\x07\ud800"))


@given(ANY)
def test_what_is_printable_can_be_written_and_controls_nothing(text: str) -> None:
    shown = printable(text)
    shown.encode()
    controls = {one for one in shown if unicodedata.category(one) == "Cc"}
    assert controls <= {"\t", "\n"}
    assert printable(shown) == shown


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]) | st.sampled_from("\t\n")))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07left", "left"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;never ended\nnext", "\nnext"),
        ("\x1bcreset", "reset"),
        ("cut off \x1b[3", "cut off 3"),
        ("bell\x07 \x9b31m \udcff", "bell\\x07 \\x9b31m \\udcff"),
    ],
)
def test_terminal_sequences_go_and_other_controls_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_data_is_printable_in_all_of_its_texts() -> None:
    data = {"a": ["\x07", 1, None, {"b": "\udcff"}], "c": 1.5}
    assert printable_data(data) == {"a": ["\\x07", 1, None, {"b": "\\udcff"}], "c": 1.5}
