"""The local cloud under contract."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.account import Account

from spottrain.cloud.local.market import MarketSpec, ZoneSpec
from spottrain.cloud.local.provider import LocalProvider


def local(request: pytest.FixtureRequest) -> Iterator[Account]:
    folder: Path = request.getfixturevalue("tmp_path")
    market = MarketSpec(
        zones=(
            ZoneSpec(
                name="a",
                capacity=3,
                slot_memory_bytes=10**9,
                spot_usd_per_hour=1.0,
                on_demand_usd_per_hour=3.0,
            ),
        )
    )
    agent = (sys.executable, "-S", "-c", "import signal; signal.pause()")
    yield Account(lambda: LocalProvider(folder, "job", market, agent), "job", 3)
    LocalProvider(folder, "job", market, agent).shut_down()
