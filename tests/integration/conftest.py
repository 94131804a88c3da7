from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from tests.fakes.held_s3 import CREDENTIALS, HeldS3, held_s3
from tests.integration import undisturbed as jobs
from tests.integration.fleet import Zygote
from tests.integration.struck_runs import Runtime, Undisturbed, train

from spottrain.wire.model import Precision


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def undisturbed_in(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the weights of an undisturbed run on one CPU, in a precision."""

    @cache
    def weights(precision: Precision, entrypoint: str = "tiny_job:job") -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp(f"undisturbed-{precision}")
        runtime = Runtime(precision=precision)
        return train(zygote, folder, 1, 1, runtime=runtime, entrypoint=entrypoint)[0]

    return weights


@pytest.fixture(scope="session")
def undisturbed(undisturbed_in: Undisturbed) -> dict[str, bytes]:
    return undisturbed_in("fp32")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> jobs.Undisturbed:
    """Return the job that nothing happened to."""
    return jobs.undisturbed(tmp_path_factory)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldS3]:
    """Return a bucket that answers what it holds only once it is let go."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with held_s3() as server:
        yield server
