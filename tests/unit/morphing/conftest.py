from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def reference() -> Path:
    """Figures measured from the original Varuna programs, kept outside this project."""
    beside = REPOSITORY.parent / "shared" / "data" / "reference"
    folder = Path(os.environ.get("SPOTTRAIN_REFERENCE", beside))
    if not folder.is_dir():
        pytest.skip(f"no reference figures in {folder}; SPOTTRAIN_REFERENCE names them")
    return folder
