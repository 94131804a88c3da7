"""The job's data as this machine sees it: checked before a launch, fetched where needed.

It is needed here if the VMs are on this machine, and while the model is inspected and
measured here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spottrain.cloud.data.cache import Cache, num_bytes
from spottrain.cloud.data.prepare import fetch_data
from spottrain.cloud.data.request import (
    DataError,
    DataMissingError,
    DataRequest,
    DataUnavailableError,
)
from spottrain.cloud.data.sources import DataSource, open_source
from spottrain.datasets import variable
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.data import DataConfig, data_requests
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.format import size
from spottrain.varuna_manager.jobs.folder import home

MAX_SAMPLE_BYTES = 10**9
"""What is larger is not fetched just to inspect a model here."""
_HOLDERS = {"s3": "aws", "gs": "gcp", "az": "azure", "abfs": "azure", "abfss": "azure"}
_THREADS = 8
_PATIENCE_S = 15.0

Say = Callable[[str], None]


def prepare_data(config: JobConfig, say: Say) -> dict[str, float]:
    """Check the data of a job from here, and have here what is needed here.

    What cannot be seen from here is told and no more: VMs may have other rights.

    Args:
        config: The job.
        say: Told what data there is, and how fetching goes on, a line each time.

    Returns:
        Bytes that each VM fetches, by the cloud whose buckets hold them.

    Raises:
        ConfigError: A dataset does not exist, or VMs' disks are too small.
        DataError, DataUnavailableError: As ``ensure_data``.
    """
    wanted = [request for request in data_requests(config.data) if request.url]
    with ThreadPoolExecutor(_THREADS, "look") as threads:
        seen = list(threads.map(_inspect, wanted))
    held: Counter[str] = Counter()
    total_bytes = 0
    for request, found in zip(wanted, seen, strict=True):
        if isinstance(found, str):
            say(f"{found}; VMs will try")
            continue
        found_bytes = num_bytes(found.files)
        total_bytes += found_bytes * (2 if request.unpack else 1)
        if (cloud := holder(request.url)) is not None:
            held[cloud] += found_bytes
        files = len(found.files)
        say(
            f"data {request.name}: {size(found_bytes)} in {files} file{'s'[: files - 1]}"
        )
    for rented in config.clouds:
        if total_bytes > rented.disk_gib * 2**30:
            raise ConfigError(
                f"{rented.cloud}.disk_gib: data takes {size(total_bytes)}, "
                f"archives and what is in them counted: got {rented.disk_gib}; raise it"
            )
    ensure_data(config, say)
    return dict(held)


def holder(url: str) -> str | None:
    """Return the cloud that has a bucket, if it is one of a cloud's own."""
    return None if "endpoint_url=" in url else _HOLDERS.get(url.partition(":")[0])


def _inspect(request: DataRequest) -> DataSource | str:
    """Return what there is of a dataset, or why that cannot be seen from here."""
    try:
        return open_source(request, _PATIENCE_S)
    except DataMissingError as error:
        raise ConfigError(f"data.{request.name}: {error}") from error
    except (DataError, DataUnavailableError) as error:
        return f"cannot be seen from here: {error}"


def ensure_data(config: JobConfig, say: Say = lambda line: None) -> None:
    """Have the user's code find the job's data here, by this process's environment.

    With the local provider that is all data. Else it is for inspecting the model: the
    samples that the job file names, paths that are here too, and what is small. What is
    set in the environment already stays.

    Args:
        config: The job.
        say: Told how fetching goes on.

    Raises:
        DataError: The local provider's data cannot be had.
        DataUnavailableError: Nor can it now.
    """
    is_local = config.resources.provider == "local"
    missing = {k: v for k, v in config.data.items() if variable(k) not in os.environ}
    for name, one in missing.items():
        if one.sample is not None and not is_local:
            os.environ[variable(name)] = one.sample
    if not missing:
        return
    cache = Cache(home() / "cache" / "data")
    if is_local:
        os.environ.update(fetch_data(data_requests(missing), cache, say))
        return
    for request in _small(missing):
        try:
            os.environ.update(fetch_data([request], cache, say))
        except (DataError, DataUnavailableError) as error:
            say(f"{error}; the model is inspected without it")


def _small(data: dict[str, DataConfig]) -> Iterator[DataRequest]:
    """Yield what can be had here without much ado."""
    for name, one in data.items():
        request = one.to_request(name)
        if one.sample is not None:
            continue
        if request.path and Path(request.path).expanduser().exists():
            yield request
        if request.url:
            try:
                found = open_source(request, _PATIENCE_S)
            except (DataError, DataUnavailableError):
                continue  # it was told, and the user's code may not ask for it
            if num_bytes(found.files) <= MAX_SAMPLE_BYTES:
                yield request
