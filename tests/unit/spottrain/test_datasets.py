"""What the user's code sees of the job's data."""

from __future__ import annotations

from pathlib import Path

import pytest

import spottrain
from spottrain.errors import UserCodeError


@pytest.fixture(autouse=True)
def corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTTRAIN_DATA_CORPUS", "/cache/corpus")


def test_a_dataset_is_found_by_its_name() -> None:
    assert spottrain.data_path("corpus") == Path("/cache/corpus")


def test_missing_data_are_reported_with_what_to_do() -> None:
    with pytest.raises(
        UserCodeError,
        match=r"^data images: is not on this machine, which has corpus; name it under "
        r"data: .* or set SPOTTRAIN_DATA_IMAGES to a path$",
    ):
        spottrain.data_path("images")
