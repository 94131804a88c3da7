"""A job's data on this machine: checked before a launch and fetched where needed.

It is needed here if the VMs run on this machine, and while the model is inspected and
measured here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from spottrain.cloud.data.sources import DataSource, open_source, pinned_url
from spottrain.datasets import variable
from spottrain.errors import ConfigError
from spottrain.eventlog.folder import home
from spottrain.varuna_manager.config.data import DataConfig, data_requests
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.format import size

MAX_SAMPLE_BYTES = 10**9
"""Larger datasets are not fetched just to inspect a model here."""
_HOLDERS = {"s3": "aws", "gs": "gcp", "az": "azure", "abfs": "azure", "abfss": "azure"}
_THREADS = 8
_PATIENCE_S = 15.0

Say = Callable[[str], None]


def prepare_data(config: JobConfig, say: Say) -> dict[str, float]:
    """Check a job's data and fetch what is needed on this machine.

    Data that this machine cannot see is only reported: VMs may have other rights.

    Args:
        say: Called with messages: what data there is, and progress.

    Returns:
        Bytes that each VM fetches, by the cloud whose buckets hold them.

    Raises:
        ConfigError: A dataset does not exist, or the VMs' disks are too small.
        DataError, DataUnavailableError: As ``ensure_data``.
    """
    wanted = [request for request in data_requests(config.data) if request.url]
    with ThreadPoolExecutor(_THREADS, "look") as threads:
        seen = list(threads.map(_inspect, wanted))
    held: Counter[str] = Counter()
    total_bytes = 0
    for request, found in zip(wanted, seen, strict=True):
        if isinstance(found, str):
            say(f"{found}; the VMs will try")
            continue
        found_bytes = num_bytes(found.files)
        kept_bytes = min(found_bytes, request.cache_bytes or found_bytes)
        total_bytes += kept_bytes * (2 if request.unpack else 1)
        if (cloud := holder(request.url)) is not None:
            held[cloud] += found_bytes
        files = len(found.files)
        say(f"data {request.name}: {size(found_bytes)} in {files} file{'s'[: files - 1]}")
    for rented in config.clouds:
        if total_bytes > rented.disk_gib * 2**30:
            raise ConfigError(
                f"{rented.cloud}.disk_gib: the data takes {size(total_bytes)}, "
                f"including unpacked archives: got {rented.disk_gib}; raise it"
            )
    try:
        ensure_data(config, say)
    except DataMissingError as error:
        raise ConfigError(str(error)) from error
    return dict(held)


def pinned(config: JobConfig) -> JobConfig:
    """Return a job whose repositories of the Hugging Face Hub are named by their commits.

    Raises:
        ConfigError: There is no such repository, revision or file, or it takes a token.
        DataUnavailableError: The Hub does not answer.
    """
    data = {}
    for name, one in config.data.items():
        if one.url is not None and one.url.startswith("hf:"):
            try:
                url = pinned_url(one.to_request(name))
            except DataError as error:
                raise ConfigError(f"data.{name}: {error}") from error
            except DataUnavailableError as error:
                raise DataUnavailableError(
                    f"{error}; a launch looks up the commit of a repository: check the network, "
                    "or HF_ENDPOINT"
                ) from error
            one = one.model_copy(update={"url": url})
        data[name] = one
    return config.model_copy(update={"data": data})


def holder(url: str) -> str | None:
    """Return the cloud whose bucket a URL names; None if it is not a cloud's."""
    return None if "endpoint_url=" in url else _HOLDERS.get(url.partition(":")[0])


def _inspect(request: DataRequest) -> DataSource | str:
    """Return what a dataset consists of, or why this machine cannot see it."""
    try:
        return open_source(request, _PATIENCE_S)
    except DataMissingError as error:
        raise ConfigError(f"data.{request.name}: {error}") from error
    except (DataError, DataUnavailableError) as error:
        return f"not visible from this machine: {error}"


def ensure_data(config: JobConfig, say: Say = lambda line: None) -> None:
    """Make the job's data available to user code that this process starts.

    With the local provider that is all data. Otherwise it is for inspecting the model:
    the samples that the job file names, paths that exist here, and small datasets. What
    the environment already sets stays.

    Args:
        say: Called with progress messages.

    Raises:
        ConfigError: A sample is not there.
        DataError: The local provider's data cannot be fetched.
        DataUnavailableError: Its source is unavailable at present.
    """
    is_local = config.resources.provider == "local"
    missing = {k: v for k, v in config.data.items() if variable(k) not in os.environ}
    for name, one in missing.items():
        if one.sample is not None and not is_local:
            if not Path(one.sample).exists():
                raise ConfigError(
                    f"data.{name}.sample: nothing is there: got {one.sample}; "
                    "put a few examples there, or leave sample out"
                )
            os.environ[variable(name)] = one.sample
    if not missing:
        return
    if is_local:
        os.environ.update(local_data(missing, say))
        return
    for request in _small(missing):
        try:
            os.environ.update(fetch_data([request], _cache(), say))
        except (DataError, DataUnavailableError) as error:
            say(f"{error}; the model is inspected without this data")


def local_data(data: Mapping[str, DataConfig], say: Say = lambda line: None) -> dict[str, str]:
    """Return the environment variables of data for VMs that are this machine, fetched.

    Raises:
        DataError: It cannot be fetched.
        DataUnavailableError: Its source is unavailable at present.
    """
    return fetch_data(data_requests(data), _cache(), say)


def _cache() -> Cache:
    return Cache(home() / "cache" / "data")


def _small(data: dict[str, DataConfig]) -> Iterator[DataRequest]:
    """Yield the datasets that are here or quickly fetched."""
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
                continue  # already reported, and the user's code may not need it
            if request.cache_bytes or num_bytes(found.files) <= MAX_SAMPLE_BYTES:
                yield request
