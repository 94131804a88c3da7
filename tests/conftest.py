from __future__ import annotations

import signal

import pytest
from tests.tiers import Tiers

# A shell that starts tests in the background lets them ignore Ctrl-C, and so all commands
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``scripts/test --all`` run everything."""
    parser.addoption("--all", action="store_true", help="also what the gate leaves out")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers(config), "tiers")
