from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.deferred import (
    DeferredDevice,
    EarlyAccessError,
    UnlockedPagesError,
)

from spottrain.pipeline.devices.port import UnusableDeviceError

LATE = 0
"""A seed with which nothing happens before somebody waits."""


def pinned(device: DeferredDevice, values: Sequence[float]) -> torch.Tensor:
    room = device.allocate_host((len(values),), torch.float32)
    return room.copy_(torch.tensor(values))


def test_what_was_waited_for_is_there() -> None:
    device = DeferredDevice(LATE)
    with device.using():
        up = device.wait(device.upload(pinned(device, range(5))))
        down = device.finish(device.download(up * 2))

    assert down.tolist() == [0, 2, 4, 6, 8]


def test_a_target_that_is_read_too_early_is_refused() -> None:
    device = DeferredDevice(LATE)
    with device.using():
        transfer = device.upload(pinned(device, [1] * 3))
        with pytest.raises(EarlyAccessError, match="touches a transfer's target"):
            transfer.target.sum()
        view = transfer.target
        assert view.data_ptr()
        assert device.wait(transfer).sum() == 3


def test_a_target_that_nobody_checks_holds_no_numbers() -> None:
    transfer = DeferredDevice(LATE).download(torch.ones(3))

    assert transfer.target.isnan().all()


def test_a_source_must_not_change_before_the_end() -> None:
    device = DeferredDevice(LATE)
    source = torch.ones(3)
    with device.using():
        transfer = device.download(source)
        assert source.sum() == 3
        with pytest.raises(EarlyAccessError, match="changes a transfer's source"):
            source.add_(1)
        device.finish(transfer)
        source.add_(1)

    assert transfer.target.tolist() == [1, 1, 1]


def test_transfers_in_one_direction_keep_their_order() -> None:
    device = DeferredDevice(LATE)
    first = device.upload(pinned(device, [1] * 2))
    second = device.upload(pinned(device, [0] * 2))

    device.wait(second)

    assert first.target.tolist() == [1, 1]


def test_synchronising_ends_all_transfers() -> None:
    device = DeferredDevice(LATE)
    transfers = [device.upload(pinned(device, [1] * 2)), device.download(torch.ones(2))]

    device.synchronise()

    assert all(transfer.target.tolist() == [1, 1] for transfer in transfers)


def test_where_the_host_reads_values_of_the_device_is_noted() -> None:
    device = DeferredDevice(LATE)
    with device.using():
        value = device.wait(device.upload(pinned(device, [1] * 2))).sum()
        torch.ones(1).item()
        device.finish(device.download(value)).item()
        assert device.host_reads == []
        value.item()
        value.tolist()

    here = test_where_the_host_reads_values_of_the_device_is_noted.__name__
    operations, places = zip(*(r.split(" in ") for r in device.host_reads), strict=True)
    assert operations == ("_local_scalar_dense", "tolist")
    assert all(place.endswith(f":{here}") for place in places)


def test_pages_are_locked_once_until_they_are_unlocked() -> None:
    device, memory = DeferredDevice(LATE), torch.zeros(100)
    device.lock_pages(memory)
    with pytest.raises(UnusableDeviceError, match="locked already"):
        device.lock_pages(memory[50:])

    device.unlock_pages(memory)

    device.lock_pages(memory[50:])


@given(st.integers(0, 99), st.lists(st.booleans(), max_size=20))
def test_an_order_is_drawn_from_the_seed(seed: int, ways: list[bool]) -> None:
    def run() -> list[bool]:
        device = DeferredDevice(seed)
        transfers = [
            (device.download if down else device.upload)(pinned(device, [1])) for down in ways
        ]
        return [bool(transfer.target == 1) for transfer in transfers]

    assert run() == run()


def test_memory_whose_pages_are_not_locked_is_refused() -> None:
    device, memory = DeferredDevice(LATE), torch.ones(8)
    with pytest.raises(UnlockedPagesError, match="not locked"):
        device.upload(memory[2:4])
    with pytest.raises(UnlockedPagesError):
        device.download(torch.ones(2), memory[2:4])

    device.lock_pages(memory)
    assert device.wait(device.upload(memory[2:4])).tolist() == [1, 1]
    device.unlock_pages(memory)

    with pytest.raises(UnlockedPagesError, match="not locked"):
        device.upload(memory)
