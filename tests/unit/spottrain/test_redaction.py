from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.redaction import VARIABLE, hide, redacted


@given(
    secret=st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=8),
    words=st.lists(st.text(max_size=9)),
)
def test_no_text_shows_a_secret(secret: str, words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "OTHER,MINE")
        patch.setenv("MINE", secret)
        assert secret not in redacted(secret.join(words)).replace("***", "\0")


def test_each_line_of_a_key_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("KEY", "-----BEGIN\nabcdefgh\n-----END")
    hide(["KEY"], "further")
    assert redacted("got abcdefgh, further") == "got ***, ***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{'Authorization': 'Bearer abc.def', 'Accept': '*/*'}", "abc.def"),
        ("authorization: Basic dXNlcjpw", "dXNlcjpw"),
        ("GET https://h/b?X-Amz-Signature=0a1b&x=1 failed", "0a1b"),
        ("url: /b?sv=2020&sig=0a1b%3D (timeout)", "0a1b"),
        ("cannot clone https://ghp_0a1b@github.com/x", "0a1b"),
        ("postgres://me:0a1b@db/x", "0a1b"),
        ("https://hub/api?token=0a1b", "0a1b"),
    ],
)
def test_credentials_that_libraries_print_are_hidden(text: str, shown: str) -> None:
    assert shown in text
    assert shown not in redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/job?endpoint_url=http://127.0.0.1:9000",
        "ssh://git@host/x",
        "secrets: MY_TOKEN is not set in the environment",
        "the bearer of news; keys=3, tokens=4096",
    ],
)
def test_other_text_is_left_as_it_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert redacted(text) == text
