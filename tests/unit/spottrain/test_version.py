from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain import __version__
from spottrain.version import is_older, software_version, sources, version_of

MODULES = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=4)


def test_it_names_the_release_and_the_sources() -> None:
    release, _, digits = software_version().partition("+")
    assert release == __version__
    assert len(digits) == 12
    assert "spottrain/varuna_manager/agent/main.py" in dict(sources())


@given(MODULES, MODULES)
def test_it_differs_if_any_module_does(
    ours: list[tuple[str, bytes]], theirs: list[tuple[str, bytes]]
) -> None:
    assert (version_of(ours) == version_of(theirs)) == (ours == theirs)


@pytest.mark.parametrize(
    ("version", "other", "older"),
    [
        ("0.1.0+aaaa", "0.2.0+bbbb", True),
        ("0.9.0", "0.10.0", True),
        ("0.2.0+aaaa", "0.1.0+bbbb", False),
        ("0.1.0+aaaa", "0.1.0+bbbb", False),
        ("0.1.0+aaaa", "", False),
    ],
)
def test_releases_have_an_order_and_sources_have_none(
    version: str, other: str, older: bool
) -> None:
    assert is_older(version, other) is older
