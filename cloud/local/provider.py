"""The local cloud as a provider: a client of its process, which it starts on demand."""

from __future__ import annotations

import http
import http.client
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import tenacity

from spottrain import version
from spottrain.cloud import unix_http
from spottrain.cloud.local.folder import (
    FolderGoneError,
    LocalFolder,
    LocalRecord,
    marker,
)
from spottrain.cloud.local.image import AGENT_ARGV
from spottrain.cloud.local.market import MarketSpec
from spottrain.cloud.local.state import CLOUD, AgentSoftware, LocalSettings
from spottrain.cloud.port import provider as port
from spottrain.cloud.port.errors import CloudError, NoCapacityError, VmNotFoundError
from spottrain.cloud.process.tree import kill_all
from spottrain.codec import encode, from_data

_START_TIMEOUT_S = 600.0
"""One that ends as it starts says so at once: only one that hangs takes so long."""
_ANSWER_TIMEOUT_S = 30.0
_WAITING = ("/agents", "/clear", "/shutdown", "/terminate")
"""Answered once other processes have imported torch, or have ended."""
_WAITING_TIMEOUT_S = 600.0
_RECONNECT_S = 15.0
_REFUSALS = {e.__name__: e for e in (NoCapacityError, VmNotFoundError)}

P = ParamSpec("P")
R = TypeVar("R")


class _NoCloudProcessError(CloudError):
    """No cloud process listens, or it is ending."""


def _reconnecting(call: Callable[P, R]) -> Callable[P, R]:
    """Repeat a call while one cloud process is replaced by the next."""
    return tenacity.retry(
        retry=tenacity.retry_if_exception_type(_NoCloudProcessError),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
        stop=tenacity.stop_after_delay(_RECONNECT_S),
        reraise=True,
    )(call)


class LocalProvider(port.CloudProvider):
    """A cloud without an account: VMs are processes of this machine.

    Several providers, in several processes, may share a ``state_dir``; only the cloud's
    process changes state. The first call that needs a market (``offers``, ``launch``)
    starts it with the market of its provider. It ends ``idle_s`` after its
    last VM and the last call. VMs and tokens persist; zones and prices start again.

    Args:
        state_dir: The cloud's folder, one per job.
        job: Name of the job; VMs are found by it.
        market: Zones, prices and events.
        agent_argv: Command of an agent; the path of its ``agent.json`` is appended.
        idle_s: See above.
    """

    name = CLOUD

    def __init__(
        self,
        state_dir: Path,
        job: str,
        market: MarketSpec,
        agent_argv: Sequence[str] = AGENT_ARGV,
        idle_s: float = 10.0,
    ) -> None:
        self._folder = LocalFolder(state_dir)
        self._settings = LocalSettings(job=job, market=market, idle_s=idle_s)
        self._agent_argv = tuple(agent_argv)

    # --- The cloud port ------------------------------------------------------------

    def offers(self) -> Sequence[port.Offer]:
        """Return a spot and an on-demand offer for each zone, at current prices."""
        data = self._ask_market("GET", "/offers")
        return cast(tuple[port.Offer, ...], from_data(tuple[port.Offer, ...], data))

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Rent machines at the price of now, which may differ from the offer's.

        Raises:
            NoCapacityError: the zone has no machine left; the token stays unused.
            CloudError: there is no such offer.
        """
        data = self._ask_market("POST", "/launch", request)
        return cast(port.LaunchResult, from_data(port.LaunchResult, data))

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return all VMs that ``job`` ever had; a terminated one has ``ended_at_s``.

        If no cloud process runs, its VMs have ended, and remaining processes of them
        are killed.
        """
        if job != self._settings.job:
            return ()
        data = self._ask_or_recover("GET", "/vms")
        if isinstance(data, LocalRecord):
            return data.vms
        return cast(tuple[port.Vm, ...], from_data(tuple[port.Vm, ...], data))

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Kill all processes of some VMs; returns when all have ended."""
        try:
            self._ask_or_recover("POST", "/terminate", list(vm_ids))
        except FolderGoneError:  # the cloud's process cannot be reached, but sees to it
            kill_all([marker(self._settings.job, vm_id) for vm_id in vm_ids])

    def clear(self, vm_id: str, lease_s: float) -> None:
        """End all processes of a VM and clear its folder; it stays, and is billed.

        Raises:
            VmNotFoundError: it has ended.
            CloudError: some processes of it are left.
        """
        body = {"vm_id": vm_id, "lease_s": lease_s}
        if isinstance(self._ask_or_recover("POST", "/clear", body), LocalRecord):
            raise VmNotFoundError(f"VM {vm_id} ended with its cloud process")

    def take(self, vm_id: str, giver: Path, order: str, until_s: float, image: str = "") -> port.Vm:
        """Take a cleared VM over from another job; see ``CloudProvider``.

        Raises:
            VmNotFoundError: it never comes by this order.
            CloudError: whether it came is not known.
        """
        name = f"{self._settings.job} {order}"
        body = {"vm_id": vm_id, "order": name, "until_s": until_s}
        theirs = LocalProvider(giver, "", self._settings.market)
        given = theirs._ask_or_recover("POST", "/give", body)
        if isinstance(given, LocalRecord):
            found = {vm.vm_id: vm for vm in given.vms}
            if given.tokens.get(f"given {name}") != (vm_id,):
                raise VmNotFoundError(f"VM {vm_id} ended with its cloud process")
            given = found[vm_id]
        body = {"vm": given, "order": order, "until_s": until_s + port.RECEIVE_S}
        return cast(port.Vm, from_data(port.Vm, self._ask_market("POST", "/receive", body)))

    def start_agent(self, vm_id: str, bootstrap: port.AgentBootstrap) -> Sequence[port.StartStep]:
        """Start the agent, detached; waits while the VM boots. No step is told.

        Raises:
            VmNotFoundError: the VM has ended.
        """
        software = AgentSoftware(
            version=version.software_version(),
            argv=self._agent_argv,
            path=version.PATH,
        )
        body = {"vm_id": vm_id, "bootstrap": bootstrap, "software": software}
        if isinstance(self._ask_or_recover("POST", "/agents", body), LocalRecord):
            raise VmNotFoundError(f"VM {vm_id} ended with its cloud process")
        return ()

    def time_s(self) -> float | None:
        """Return the time by the clock of the cloud's process; None if none runs."""
        told = self._ask_or_recover("GET", "/time")
        return None if isinstance(told, LocalRecord) else float(told)

    def shut_down(self) -> None:
        """End all VMs and the cloud's process; returns when all have ended."""
        try:
            if isinstance(self._ask_or_recover("POST", "/shutdown"), LocalRecord):
                return
        except FolderGoneError:
            return  # it ends by itself, as it has no VMs
        with self._folder.lock("cloud"):  # held until its process has ended
            self._folder.recover()

    # --- Requests to the cloud's process -------------------------------------------

    @_reconnecting
    def _ask_market(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer of the cloud's process; start it if there is none."""
        try:
            return self._ask(method, path, body)
        except _NoCloudProcessError:
            self._start()
            return self._ask(method, path, body)

    @_reconnecting
    def _ask_or_recover(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer of the cloud's process, or the ``LocalRecord`` it left."""
        try:
            return self._ask(method, path, body)
        except _NoCloudProcessError:
            with self._folder.lock("cloud", wait=False) as held:
                if not held:
                    raise
                return self._folder.recover()

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        """Return the JSON answer of a running cloud process.

        Raises:
            _NoCloudProcessError: there is none, or it is ending.
            CloudError: it refused, failed, or did not answer in time.
        """
        timeout_s = _ANSWER_TIMEOUT_S
        if path in _WAITING:
            boot_s = max(zone.boot_s for zone in self._settings.market.zones)
            timeout_s = _WAITING_TIMEOUT_S + boot_s
        try:
            status, answer = unix_http.request(
                str(self._folder.socket),
                method,
                path,
                timeout_s=timeout_s,
                body=encode(body).encode(),
            )
        except TimeoutError as error:
            raise CloudError(
                f"the local cloud does not answer {path}; see {self._folder.log}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise _NoCloudProcessError(
                f"the local cloud cannot be reached ({error}); see {self._folder.log}"
            ) from error
        if status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            raise _NoCloudProcessError("the local cloud is ending; try again")
        if status == http.HTTPStatus.CONFLICT:
            refusal = json.loads(answer)
            raise _REFUSALS.get(refusal["error"], CloudError)(refusal["message"])
        if status >= http.HTTPStatus.BAD_REQUEST:
            raise CloudError(f"the local cloud failed at {path} ({status}); see {self._folder.log}")
        return json.loads(answer) if answer else None

    # --- Starting the cloud's process ----------------------------------------------

    def _start(self) -> None:
        """Start the cloud's process unless it already listens.

        Raises:
            CloudError: it did not start.
        """
        with self._folder.lock("start"):
            if self._listens():
                return
            try:
                self._folder.save_settings(self._settings)
            except OSError as error:
                raise CloudError(
                    f"the local cloud cannot save its settings ({error}); free disk "
                    "space or choose another state directory"
                ) from error
            ready, ready_fd = os.pipe()
            try:
                self._spawn(ready_fd)
                in_time, _, _ = select.select([ready], [], [], _START_TIMEOUT_S)
                if not in_time or not os.read(ready, 1):
                    raise CloudError(f"the local cloud did not start; see {self._folder.log}")
            finally:
                os.close(ready)

    def _spawn(self, ready_fd: int) -> None:
        """Start a cloud process, which takes over ``ready_fd``."""
        argv = [sys.executable, "-P", "-m", "spottrain.cloud.local"]
        try:
            with self._folder.log.open("ab") as log:
                subprocess.run(
                    [*argv, str(self._folder.path), "--ready-fd", str(ready_fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[ready_fd],
                    check=False,  # the pipe reports success
                )
        finally:
            os.close(ready_fd)

    def _listens(self) -> bool:
        try:
            unix_http.connect(str(self._folder.socket), _ANSWER_TIMEOUT_S).close()
        except OSError:
            return False
        return True
