from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A loaded machine may stop for longer than any deadline of an example.
settings.register_profile("no hurry", deadline=None)
settings.load_profile("no hurry")

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def reference() -> Path:
    """Figures measured from the original Varuna programs, kept outside this project."""
    beside = REPOSITORY.parent / "shared" / "data" / "reference"
    folder = Path(os.environ.get("SPOTTRAIN_REFERENCE", beside))
    if not folder.is_dir():
        pytest.skip(f"no reference figures in {folder}; SPOTTRAIN_REFERENCE names them")
    return folder
