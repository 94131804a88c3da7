from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.processes import Processes
from tests.tiers import Tiers, scope

if TYPE_CHECKING:  # a GPU host that runs tests/gpu alone lacks what the fakes need
    from tests.fakes.aws import FakeAws
    from tests.fakes.azure import FakeAzure
    from tests.fakes.gcp import FakeGcp

    from tests.commands import Run

# Importing everything makes hundreds of thousands of objects that stay (Tiers ends this).
gc.disable()

# A shell that starts tests in the background lets them ignore Ctrl-C, and so all commands
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``scripts/test --all`` run everything."""
    parser.addoption("--all", action="store_true", help="also what the gate leaves out")
    parser.addoption("--processes", type=int, default=0, help="that run tests")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers(config), "tiers")
    if config.option.processes:
        config.pluginmanager.register(Processes(config.option.processes, scope))
    inspected = tempfile.TemporaryDirectory(prefix="spottrain-inspected-")
    config.add_cleanup(inspected.cleanup)
    os.environ["SPOTTRAIN_TEST_INSPECTED"] = inspected.name


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs commands of ``spottrain`` in this process."""
    from tests.commands import runs

    return runs(monkeypatch, capsys)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, as workers do, so that the order of its sums is the same."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# One fake of each cloud for a process: to start one takes seconds.


@pytest.fixture(scope="session")
def fake_aws() -> Iterator[FakeAws]:
    """Return the fake AWS; who uses it empties it first."""
    from tests.fakes.aws import running

    with running() as fake:
        yield fake


@pytest.fixture(scope="session")
def fake_azure() -> Iterator[FakeAzure]:
    """Return the fake Azure; who uses it empties it first."""
    from tests.fakes.azure import running

    with running() as fake:
        yield fake


@pytest.fixture(scope="session")
def fake_gcp() -> Iterator[FakeGcp]:
    """Return the fake GCP; who uses it empties it first."""
    from tests.fakes.gcp import running

    with running() as fake:
        yield fake
