"""Several clouds as one provider.

Calls about an offer or a VM go to its cloud, others to all clouds. A cloud that is
down, throttled or without credentials does not stop the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spottrain.cloud.port import provider as port
from spottrain.cloud.port.errors import CloudError, MisconfiguredError, VmNotFoundError
from spottrain.errors import SpottrainError

logger = logging.getLogger(__name__)

REOPEN_S = 60.0
"""Time between two attempts to open a cloud."""

T = TypeVar("T")
Opener = Callable[[], port.CloudProvider]


class UnusedCloudError(CloudError):
    """A cloud cannot be opened, and the job has nothing there."""


def open_clouds(openers: Mapping[str, Opener], unused: Collection[str] = ()) -> MultiCloudProvider:
    """Open the clouds of a job.

    Args:
        openers: Opens each cloud, by name.
        unused: Clouds that the job never used. While they cannot be opened, the job has
            nothing to be listed or removed there.

    Raises:
        SpottrainError: no cloud can be opened; the error of the first. If some can, the
            others are retried when they are needed.
    """
    clouds = [LazyCloud(name, opener, unused=name in unused) for name, opener in openers.items()]
    one = MultiCloudProvider(clouds)
    opened, failures = one.ask(lambda cloud: cloud.name)
    if not opened:
        raise next(cloud.open_error for cloud in clouds if cloud.open_error)
    for name, error in failures.items():
        logger.warning("continuing without %s until it can be opened: %s", name, error)
    return one


class MultiCloudProvider(port.CloudProvider):
    """Clouds of one job; made by ``open_clouds``.

    What it reports of all clouds is that of those that answer.
    """

    def __init__(self, clouds: Sequence[LazyCloud]) -> None:
        self.name = "+".join(cloud.name for cloud in clouds)
        self._clouds = {cloud.name: cloud for cloud in clouds}

    def parts(self) -> Mapping[str, port.CloudProvider]:
        """See ``CloudProvider``."""
        return {name: MultiCloudProvider([cloud]) for name, cloud in self._clouds.items()}

    # --- What belongs to one cloud ----------------------------------------------------

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Launch in the offer's cloud; see ``CloudProvider``."""
        cloud = self._clouds.get(request.offer.cloud)
        if cloud is None:
            raise MisconfiguredError(f"{request.offer.cloud}: not a cloud of this job")
        return cloud.opened().launch(request)

    def start_agent(self, vm_id: str, bootstrap: port.AgentBootstrap) -> Sequence[port.StartStep]:
        """See ``CloudProvider``."""
        cloud = self._clouds.get(port.cloud_of(vm_id))
        if cloud is None:
            raise VmNotFoundError(f"VM {vm_id} is unknown or has ended")
        return cloud.opened().start_agent(vm_id, bootstrap)

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Request termination from every VM's cloud; see ``CloudProvider``."""
        wanted: dict[str, list[str]] = {}
        for vm_id in vm_ids:
            wanted.setdefault(port.cloud_of(vm_id), []).append(vm_id)
        _raise_first(self.ask(lambda cloud: cloud.terminate(wanted[cloud.name]), wanted)[1])

    # --- What all must do -------------------------------------------------------------

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return the VMs of all clouds.

        Raises:
            SpottrainError: a cloud does not answer, so its VMs are unknown.
        """
        found, failures = self.ask(lambda cloud: cloud.list_vms(job))
        _raise_first(_of_used(failures))
        return tuple(vm for vms in found.values() for vm in vms)

    def release(self, job: str) -> None:
        """See ``CloudProvider``; a partial release is a failure."""
        _raise_first(_of_used(self.ask(lambda cloud: cloud.release(job))[1]))

    # --- What those do that answer ----------------------------------------------------

    def offers(self) -> Sequence[port.Offer]:
        """Return the offers of the clouds that answer.

        Raises:
            SpottrainError: no cloud answers.
        """
        return self._union(lambda cloud: cloud.offers())

    def quotas(self) -> Sequence[port.Quota]:
        """See ``CloudProvider``."""
        return self._union(lambda cloud: cloud.quotas())

    def spot_pools(self, count: int) -> Sequence[port.SpotPool]:
        """See ``CloudProvider``."""
        return self._union(lambda cloud: cloud.spot_pools(count))

    def time_s(self) -> float | None:
        """Return the time by the first cloud that tells; see ``CloudProvider``."""
        found, failures = self.ask(lambda cloud: cloud.time_s())
        times_s = [time_s for time_s in found.values() if time_s is not None]
        if not times_s:
            _raise_first(failures)
        return next(iter(times_s), None)

    # --- Connections ------------------------------------------------------------------

    def serve(self, manager_url: str) -> None:
        """See ``CloudProvider``."""
        for cloud in self._clouds.values():
            cloud.serve(manager_url)

    def unreachable_vms(self) -> Collection[str]:
        """See ``CloudProvider``."""
        return tuple(i for cloud in self._clouds.values() for i in cloud.unreachable_vms())

    def close(self) -> None:
        """Close all clouds; VMs keep running."""
        with ThreadPoolExecutor(len(self._clouds), "cloud") as threads:
            for cloud in self._clouds.values():
                threads.submit(cloud.close)

    # --- Calls to several clouds ------------------------------------------------------

    def ask(
        self, what: Callable[[port.CloudProvider], T], names: Collection[str] | None = None
    ) -> tuple[dict[str, T], dict[str, SpottrainError]]:
        """Call clouds in parallel, by default all; return results and failures by name."""
        found: dict[str, T] = {}
        failures: dict[str, SpottrainError] = {}
        clouds = [c for c in self._clouds.values() if names is None or c.name in names]

        def ask_one(cloud: LazyCloud) -> T:
            return what(cloud.opened())

        with ThreadPoolExecutor(max(1, len(clouds)), "cloud") as threads:
            answers = {cloud.name: threads.submit(ask_one, cloud) for cloud in clouds}
        for name, answer in answers.items():
            try:
                found[name] = answer.result()
            except SpottrainError as error:
                failures[name] = error
        return found, failures

    def _union(self, what: Callable[[port.CloudProvider], Sequence[T]]) -> Sequence[T]:
        found, failures = self.ask(what)
        if not found:
            _raise_first(failures)
        for name, error in failures.items():
            logger.warning("%s: %s", name, error)
        return tuple(one for some in found.values() for one in some)


class LazyCloud:
    """One cloud of several, opened when it is needed and possible.

    Args:
        name: Of the cloud.
        opener: Opens it.
        unused: The job never used it.
    """

    def __init__(self, name: str, opener: Opener, *, unused: bool) -> None:
        self.name = name
        self._unused = unused
        self.open_error: SpottrainError | None = None
        """Why it could not be opened."""
        self._cloud: port.CloudProvider | None = None
        self._opener = opener
        self._lock = threading.Lock()
        self._again_at_s = 0.0
        self._manager_url = ""
        self._closed = False

    def opened(self) -> port.CloudProvider:
        """Return the cloud.

        Raises:
            UnusedCloudError: it cannot be opened and was never used.
            CloudError: it cannot be opened.
        """
        with self._lock:
            if self._cloud is None and self._closed:
                raise CloudError(f"{self.name}: is already closed")
            if self._cloud is None and time.monotonic() >= self._again_at_s:
                self._open()
            if self._cloud is not None:
                return self._cloud
        if self._unused:
            raise UnusedCloudError(f"{self.name}: {self.open_error}")
        if isinstance(self.open_error, CloudError):
            raise self.open_error.with_traceback(None)
        raise CloudError(f"{self.name}: {self.open_error}")

    def _open(self) -> None:
        try:
            self._cloud = self._opener()
        except SpottrainError as error:
            self.open_error = error
            self._again_at_s = time.monotonic() + REOPEN_S
            return
        if self._manager_url:
            self._cloud.serve(self._manager_url)

    def serve(self, manager_url: str) -> None:
        """Forward agents' calls to this manager once it is open; see ``CloudProvider``."""
        with self._lock:
            self._manager_url = manager_url
            if self._cloud is not None:
                self._cloud.serve(manager_url)

    def unreachable_vms(self) -> Collection[str]:
        """Return its unreachable VMs, without waiting while it is being opened."""
        cloud = self._cloud
        return () if cloud is None else cloud.unreachable_vms()

    def close(self) -> None:
        """Close it for good."""
        with self._lock:
            self._closed, cloud, self._cloud = True, self._cloud, None
        if cloud is not None:
            cloud.close()


def _of_used(failures: Mapping[str, SpottrainError]) -> Mapping[str, SpottrainError]:
    """Return the failures of clouds in which a job has something."""
    return {n: error for n, error in failures.items() if not isinstance(error, UnusedCloudError)}


def _raise_first(failures: Mapping[str, SpottrainError]) -> None:
    for error in failures.values():
        raise error
