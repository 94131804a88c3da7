"""``spottrain init``: examples that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from spottrain.errors import ConfigError
from spottrain.varuna_manager.cli import init
from spottrain.varuna_manager.config.job import load_config


@pytest.mark.parametrize("starter", init.Starter)
def test_an_example_is_written_whole_and_over_nothing(
    tmp_path: Path, starter: init.Starter
) -> None:
    file = init.write(tmp_path / "new", starter)
    module = load_config(file).entrypoint.partition(":")[0]
    assert (file.parent / f"{module}.py").exists()
    with pytest.raises(ConfigError, match="exists already; name another folder"):
        init.write(tmp_path / "new", starter)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/new: cannot be written: Not a directory"):
        init.write(tmp_path / "file" / "new", init.Starter.VIT)
