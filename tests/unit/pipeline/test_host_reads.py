"""A mini-batch on a device holds the host for nothing but its commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.deferred import DeferredDevice
from tests.gpu.hidden_syncs import STEPS, places_of_minibatches
from tests.tiers import first_always

from spottrain.pipeline.comm.groups import open_rendezvous
from spottrain.pipeline.model import optimizer
from spottrain.wire.model import Precision, Reduction

NORM = "tolist in spottrain.pipeline.state.update:_square_norms"
Place = tuple[str, int]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    server = open_rendezvous("127.0.0.1", 0, is_server=True, timeout_s=600.0)
    yield "127.0.0.1", server.port  # type: ignore[attr-defined]
    del server


@pytest.mark.rotated
@pytest.mark.parametrize("precision", first_always(["fp32", "fp16"]))
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_with_state_on_the_host_nothing_is_read_from_the_device(
    tmp_path: Path, store: Place, reduction: Reduction, precision: Precision
) -> None:
    where = tmp_path, store, DeferredDevice(3)
    places = places_of_minibatches(*where, "tiny_fused", reduction, "host", precision)

    assert places == [[]] * STEPS


@pytest.mark.rotated
@pytest.mark.parametrize("precision", first_always(["fp32", "fp16"]))
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_with_state_on_the_device_norms_are_read_once(
    tmp_path: Path, store: Place, reduction: Reduction, precision: Precision
) -> None:
    where = tmp_path, store, DeferredDevice(3)
    places = places_of_minibatches(*where, "tiny_fused", reduction, "device", precision)

    assert len(places) == STEPS
    if precision == "fp32":
        assert places == [[NORM]] * STEPS
    else:  # what overflows has no norm
        assert all(set(one) <= {NORM} and len(one) <= 1 for one in places)


@pytest.mark.rotated
def test_an_optimizer_that_is_not_fused_reads_its_own_steps(tmp_path: Path, store: Place) -> None:
    where = tmp_path, store, DeferredDevice(3)
    places = places_of_minibatches(*where, "tiny", "fast", "device", "fp32")

    others = set(places[-1]) - {NORM}
    assert others == {f"_local_scalar_dense in {optimizer.__name__}:step"}
