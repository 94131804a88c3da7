"""What is wrong with a machine is no bug of ours."""

from __future__ import annotations

import errno
import os
from unittest.mock import Mock

import pytest

from spottrain.eventlog.folder import home
from spottrain.varuna_manager.api.trouble import trouble_of_machine


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_files_that_cannot_be_written_are_named_with_the_way_out(number: int) -> None:
    trouble = trouble_of_machine(OSError(number, os.strerror(number), "/state/jobs"))
    assert "/state/jobs" in trouble
    assert "SPOTTRAIN_HOME" in trouble


def test_a_state_directory_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTTRAIN_HOME", "/proc/nowhere")
    with pytest.raises(FileNotFoundError) as raised:
        home().mkdir(parents=True)
    assert "/proc/nowhere" in trouble_of_machine(raised.value)


def test_other_errors_are_bugs() -> None:
    assert not trouble_of_machine(OSError(errno.EINVAL, "Invalid argument"))
    assert not trouble_of_machine(ValueError("x"))


@pytest.mark.parametrize("now_s", [0.0, 1e10])
def test_a_clock_that_nobody_can_mean_is_named(
    monkeypatch: pytest.MonkeyPatch, now_s: float
) -> None:
    monkeypatch.setattr("time.time", lambda: now_s)
    assert "clock" in trouble_of_machine(OSError(errno.EINVAL, "Invalid argument"))


def test_a_clock_that_python_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    overflow = OverflowError("timestamp too large to convert to C _PyTime_t")
    monkeypatch.setattr("time.time", Mock(side_effect=overflow))
    assert "clock" in trouble_of_machine(overflow)
