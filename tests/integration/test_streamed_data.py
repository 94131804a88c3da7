"""A corpus that no machine could hold: a tenth of it is there at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.hub import Hub, serve_hub
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.cloud.data.cache import Cache
from spottrain.cloud.data.prepare import fetch_data
from spottrain.cloud.data.request import DataRequest
from spottrain.cloud.data.stream import Stream
from spottrain.datasets import variable
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import LoaderSpec

FILES, EXAMPLES, EXAMPLE_BYTES = 40, 4, 9
CACHE_BYTES = FILES * EXAMPLES * EXAMPLE_BYTES // 10
STEPS = 24
"""More than an epoch, of mini-batches of eight."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    drawn = random.Random(0)
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        contents = {
            f"part-{i:02}.bin": bytes(drawn.choices(range(32), k=EXAMPLES * EXAMPLE_BYTES))
            for i in range(FILES)
        }
        hub.repository("org/corpus", "datasets").commit(contents)
        yield hub


def prepared(folder: Path, cache_bytes: int) -> tuple[Stream, dict[str, str]]:
    url = "hf://datasets/org/corpus"
    request = DataRequest(name="corpus", url=url, cache_bytes=cache_bytes)
    environment = fetch_data([request], Cache(folder))
    return Stream(Path(environment[variable("corpus")])), environment


def spec_of(folder: Path) -> JobSpec:
    folder.mkdir()
    spec = job_spec(folder, steps=STEPS, entrypoint="shard_jobs:job")
    return replace(spec, loader=LoaderSpec(workers=1, ahead=3))


@pytest.mark.nightly
def test_a_kill_and_a_morph_read_the_same_examples(
    zygote: Zygote, tmp_path: Path, hub: Hub
) -> None:
    spec = spec_of(tmp_path / "whole")
    stream, environment = prepared(tmp_path / "large", 10 * CACHE_BYTES)
    environment["HF_ENDPOINT"] = hub.url
    with Fleet(spec, "a", tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        plan = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        reference = fleet.train(lambda _: plan, fleet.initialise())
    assert stream.usage["files"] == FILES

    spec = spec_of(tmp_path / "tenth")
    stream, environment = prepared(tmp_path / "small", CACHE_BYTES)
    environment |= {"HF_ENDPOINT": hub.url, "TINY_SLEEP_S": "0.05"}
    with Fleet(spec, "abc", tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        checkpoint = fleet.initialise()
        fleet.run(make_plan(spec, 1, 2, "ab", NUM_SECTIONS), checkpoint)
        fleet.wait_for_step(4)
        fleet.machines["b"].kill_leader()
        assert not fleet.wait_for_end({"a"})
        deep = make_plan(spec, 2, 1, "ac", NUM_SECTIONS)
        weights = fleet.train(lambda _: deep, checkpoint)

    assert weights == reference
    assert stream.usage["most"] <= CACHE_BYTES
    assert stream.usage["fetched"] > 9 * CACHE_BYTES
