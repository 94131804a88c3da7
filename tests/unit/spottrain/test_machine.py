from __future__ import annotations

import platform
import sys

import spottrain
from spottrain import machine


def test_the_device_is_named_with_its_threads() -> None:
    name, _, threads = machine.device().rpartition(", ")

    assert name
    assert threads == "1 thread"


def test_software_is_all_that_times_depend_on() -> None:
    import torch

    assert machine.software() == (
        f"spottrain {spottrain.__version__}, torch {torch.__version__}, "
        f"python {platform.python_version()}"
    )


def test_a_computer_keeps_its_name_and_has_cores_and_memory() -> None:
    assert machine.machine_id() == machine.machine_id() != ""
    assert machine.cores() >= 1
    assert 0 < machine.available_bytes() < sys.maxsize
