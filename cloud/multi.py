"""Several clouds as one provider.

Calls about an offer or a VM go to its cloud, others to all clouds. A cloud that is
down, throttled or without credentials does not stop the others. VM ids begin with the
name of their cloud.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Concatenate, TypeVar

from spottrain.cloud.port import provider as port
from spottrain.cloud.port.abilities import ForwardsAbilities, P, R, arguments_by_name
from spottrain.cloud.port.errors import CloudError, MisconfiguredError, VmNotFoundError
from spottrain.errors import SpottrainError

logger = logging.getLogger(__name__)

REOPEN_S = 60.0
"""Time between two attempts to open a cloud."""

T = TypeVar("T")
Opener = Callable[[], port.CloudProvider]


class UnusedCloudError(CloudError):
    """A cloud cannot be opened, and the job has nothing there."""


class NamespacedProvider(ForwardsAbilities):
    """One cloud of several: the ids of its VMs begin with its name.

    It has every optional ability that the cloud has.

    Args:
        inner: The cloud.
    """

    def __init__(self, inner: port.CloudProvider) -> None:
        self.name = inner.name
        self._inner = inner
        self._forward_abilities(lambda ability: isinstance(inner, ability), self._forward)

    def offers(self) -> Sequence[port.Offer]:
        """See ``CloudProvider``."""
        return self._inner.offers()

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """See ``CloudProvider``."""
        result = self._inner.launch(request)
        return replace(result, vms=tuple(map(self._named, result.vms)))

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """See ``CloudProvider``."""
        return tuple(map(self._named, self._inner.list_vms(job)))

    def terminate(self, vm_ids: Collection[str]) -> None:
        """See ``CloudProvider``."""
        split = map(split_vm_id, vm_ids)
        self._inner.terminate([own for cloud, own in split if cloud == self.name])

    def close(self) -> None:
        """Close the cloud if it can be closed."""
        _close(self._inner)

    def _named(self, vm: port.Vm) -> port.Vm:
        return replace(vm, vm_id=vm_id_of(self.name, vm.vm_id))

    def _forward(self, method: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        """Return a method that takes our VM ids and calls the cloud with its own."""

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            given = arguments_by_name(method, args, kwargs)
            if "vm_id" in given:
                cloud, given["vm_id"] = split_vm_id(wanted := given["vm_id"])
                if cloud != self.name:
                    raise VmNotFoundError(f"VM {wanted} is unknown or has ended")
            found = getattr(self._inner, method.__name__)(**given)
            if isinstance(found, port.Vm):
                return self._named(found)
            if isinstance(found, Sequence):
                return tuple(self._named(x) if isinstance(x, port.Vm) else x for x in found)
            return found

        return call


class MultiCloudProvider(ForwardsAbilities):
    """Clouds of one job; see ``HasParts``.

    It has each optional ability that one of its clouds has, but ``TellsTime``. Calls to all clouds return
    the answers of those that succeed.

    Args:
        openers: Opens each cloud, by name; VM ids are those of ``NamespacedProvider``.
        unused: Clouds that the job never used. While they cannot be opened, the job has
            nothing to be listed or removed there.

    Raises:
        SpottrainError: no cloud can be opened; the error of the first. If some can, the
            others are retried when they are needed.
    """

    def __init__(self, openers: Mapping[str, Opener], unused: Collection[str] = ()) -> None:
        self.name = "+".join(openers)
        self._parts = {
            name: _Part(name, opener, unused=name in unused) for name, opener in openers.items()
        }
        opened, failures = self._each(_Part.opened)
        if not opened:
            raise next(part.open_error for part in self._parts.values() if part.open_error)
        for name, error in failures.items():
            logger.warning("continuing without %s until it can be opened: %s", name, error)
        self._forward_abilities(
            lambda ability: (
                ability is not port.TellsTime  # whose time it is, parts say
                and any(isinstance(x, ability) for x in opened.values())
            ),
            self._forward,
        )

    def parts(self) -> Mapping[str, port.CloudProvider]:
        """See ``HasParts``."""
        return self._parts

    # --- The cloud port ---------------------------------------------------------------

    def offers(self) -> Sequence[port.Offer]:
        """Return the offers of the clouds that answer.

        Raises:
            SpottrainError: no cloud answers.
        """
        return self._union(_Part.offers)

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Launch in the offer's cloud; see ``CloudProvider``."""
        part = self._parts.get(request.offer.cloud)
        if part is None:
            raise MisconfiguredError(f"{request.offer.cloud}: not a cloud of this job")
        return part.launch(request)

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return the VMs of all clouds.

        Raises:
            SpottrainError: a cloud does not answer, so its VMs are unknown.
        """
        found, failures = self._each(lambda part: part.list_vms(job))
        _raise_first(failures)
        return tuple(vm for vms in found.values() for vm in vms)

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Request termination from every VM's cloud; see ``CloudProvider``."""
        wanted: dict[str, list[str]] = {}
        for vm_id in vm_ids:
            if (name := split_vm_id(vm_id)[0]) in self._parts:
                wanted.setdefault(name, []).append(vm_id)
        _raise_first(self._each(lambda part: part.terminate(wanted[part.name]), wanted)[1])

    # --- What else a manager needs ----------------------------------------------------

    def serve(self, manager_url: str) -> None:
        """Forward calls to this manager from now on; see ``ForwardsCalls``."""
        for part in self._parts.values():
            part.serve(manager_url)

    def unreachable_vms(self) -> Collection[str]:
        """Return the unreachable VMs; see ``ReportsUnreachableVms``."""
        return tuple(i for part in self._parts.values() for i in part.unreachable_vms())

    def close(self) -> None:
        """Close all clouds; VMs keep running."""
        self._each(_Part.close)

    def _forward(self, method: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        """Return a method that calls a VM's cloud, or all clouds with the ability."""
        name = method.__name__

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            given = arguments_by_name(method, args, kwargs)
            if "vm_id" in given:
                part = self._parts.get(split_vm_id(given["vm_id"])[0])
                if part is None:
                    raise VmNotFoundError(f"VM {given['vm_id']} is unknown or has ended")
                return part.ask(name, given)

            def answer(part: _Part) -> Any:
                try:
                    return part.ask(name, given) if part.can(name) else ()
                except UnusedCloudError:
                    return ()

            if name == "release":  # a partial release is a failure
                _raise_first(self._each(answer)[1])
                return None
            return self._union(answer)

        return call

    # --- Calls to several clouds ------------------------------------------------------

    def _union(self, ask: Callable[[_Part], Sequence[T]]) -> Sequence[T]:
        found, failures = self._each(ask)
        if not found:
            _raise_first(failures)
        for name, error in failures.items():
            logger.warning("%s: %s", name, error)
        return tuple(one for some in found.values() for one in some)

    def _each(
        self, ask: Callable[[_Part], T], names: Collection[str] | None = None
    ) -> tuple[dict[str, T], dict[str, SpottrainError]]:
        """Call clouds in parallel; return results and failures by name."""
        found: dict[str, T] = {}
        failures: dict[str, SpottrainError] = {}
        parts = [p for p in self._parts.values() if names is None or p.name in names]
        with ThreadPoolExecutor(max(1, len(parts)), "cloud") as threads:
            answers = {part.name: threads.submit(ask, part) for part in parts}
        for name, answer in answers.items():
            try:
                found[name] = answer.result()
            except SpottrainError as error:
                failures[name] = error
        return found, failures


class _Part:
    """One cloud of several, opened when possible."""

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
        if self._manager_url and isinstance(self._cloud, port.ForwardsCalls):
            self._cloud.serve(self._manager_url)

    def offers(self) -> Sequence[port.Offer]:
        return self.opened().offers()

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        return self.opened().launch(request)

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        try:
            return self.opened().list_vms(job)
        except UnusedCloudError:
            return ()

    def terminate(self, vm_ids: Collection[str]) -> None:
        self.opened().terminate(vm_ids)

    def time_s(self) -> float | None:
        cloud = self.opened()
        return cloud.time_s() if isinstance(cloud, port.TellsTime) else None

    def can(self, method: str) -> bool:
        """Return True if the cloud has a method.

        Raises:
            CloudError: it cannot be opened.
        """
        return getattr(self.opened(), method, None) is not None

    def ask(self, method: str, given: Mapping[str, Any]) -> Any:
        """Call an ability's method.

        Raises:
            CloudError: the cloud lacks the ability, or its own error.
        """
        if not self.can(method):
            raise CloudError(f"{self.name}: cannot {method.replace('_', ' ')}")
        return getattr(self.opened(), method)(**given)

    def unreachable_vms(self) -> Collection[str]:
        cloud = self._cloud  # without waiting while it is being opened
        return cloud.unreachable_vms() if isinstance(cloud, port.ReportsUnreachableVms) else ()

    def serve(self, manager_url: str) -> None:
        with self._lock:
            self._manager_url = manager_url
            if isinstance(self._cloud, port.ForwardsCalls):
                self._cloud.serve(manager_url)

    def close(self) -> None:
        with self._lock:
            self._closed, cloud, self._cloud = True, self._cloud, None
        if cloud is not None:
            _close(cloud)


def vm_id_of(cloud: str, own_id: str) -> str:
    """Return the id of a VM among several clouds."""
    return f"{cloud}.{own_id}"


def split_vm_id(vm_id: str) -> tuple[str, str]:
    """Return (cloud, id in that cloud); the cloud is empty if the id names none."""
    cloud, dot, own = vm_id.partition(".")
    return (cloud, own) if dot else ("", vm_id)


def _raise_first(failures: Mapping[str, SpottrainError]) -> None:
    for error in failures.values():
        raise error


def _close(cloud: port.CloudProvider) -> None:
    leave = getattr(cloud, "close", None)
    if leave is not None:
        leave()
