"""What binds the software of later VMs."""

from __future__ import annotations

from pathlib import Path

import pytest

from spottrain.cloud.ssh.hosts.bootstrap import check_software, pins_of
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.cloud.ssh.transport.hosts import UnfitHostError

FIRST = {
    "machine": "x86_64",
    "python": "3.12",
    "torch": "2.10.0+cu129",
    "numpy": "2.3.0",
    "safetensors": "0.7.0",
    "cuda": "12.9",
    "nccl": "2.28.9",
    "nccl_package": "nvidia-nccl-cu12",
}


def test_later_vms_install_the_first_ones_torch_and_nccl(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path)
    assert pins_of(memory.known_software()) == []
    check_software("a", FIRST, memory.same_software)
    assert pins_of(memory.known_software()) == [
        "torch==2.10.0",
        "nvidia-nccl-cu12==2.28.9",
    ]
    newer = FIRST | {"nccl": "2.29.1"}
    with pytest.raises(UnfitHostError, match=r"nccl 2\.29\.1, the other hosts have"):
        check_software("b", newer, memory.same_software)


def test_a_record_of_an_earlier_version_names_no_package_of_nccl() -> None:
    old = {key: value for key, value in FIRST.items() if key != "nccl_package"}
    assert pins_of(old) == ["torch==2.10.0"]
    assert pins_of(FIRST | {"nccl": "", "nccl_package": ""}) == ["torch==2.10.0"]
