"""A provider to be put into a child process: it does as its settings and calls say."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Sequence
from typing import Any

from tests.builders import a_vm, an_offer

from spottrain.cloud.port import errors
from spottrain.cloud.port.provider import (
    AgentBootstrap,
    CloudProvider,
    LaunchRequest,
    LaunchResult,
    Offer,
    Quota,
    SshTarget,
    StartStep,
    Vm,
    VmState,
)
from spottrain.errors import UserCodeError

OFFER = an_offer(
    cloud="odd",
    usd_per_hour=0.1,
    observed_at_s=1.5,
    gpu_memory_bytes=1 << 34,
    family="f",
)


class OddProvider(CloudProvider):
    """Rents nothing."""

    name = "odd"

    def __init__(self, settings: dict[str, Any]) -> None:
        self._gate = threading.Barrier(settings.get("together", 1), timeout=600)

    def offers(self) -> Sequence[Offer]:
        self._gate.wait()
        return [OFFER]

    def launch(self, request: LaunchRequest) -> LaunchResult:
        if request.token == "die":
            os._exit(9)
        vm = a_vm(
            f"{request.token}-é",
            request.offer,
            job=request.job,
            intent=request.intent,
            state=VmState.STARTING,
            launched_at_s=2.25,
        )
        return LaunchResult(vms=(vm,) * request.count)

    def list_vms(self, job: str) -> Sequence[Vm]:
        print("an SDK chats")  # noqa: T201
        assert sys.stdin.read() == ""
        return ()

    def terminate(self, vm_ids: Collection[str]) -> None:
        match sorted(vm_ids):
            case ["hang"]:
                threading.Event().wait()
            case ["setup"]:
                raise UserCodeError("setup failed", "its output")
            case ["throttled"]:
                raise errors.ThrottledError("slow down", 7.5)
            case ["queued"]:
                raise errors.QueuedError("wait", 2.5)
            case ["own"]:
                raise OwnError("unheard of")
            case ["bug"]:
                raise ZeroDivisionError("1/0")
            case [name]:
                kind: type[errors.CloudError] = getattr(errors, name)
                raise kind(f"{name} is said")
            case _:
                pass

    def quotas(self) -> Sequence[Quota]:
        return [Quota(region="r", family="f", spot=True, limit=8.0, unit="vcpu")]

    def ssh_target(self, vm_id: str) -> SshTarget | None:
        if vm_id == "boots":
            return None
        return SshTarget(host="h", user="u", host_keys=("k a", "k b"), port=2222)

    def start_agent(self, vm_id: str, bootstrap: AgentBootstrap) -> Sequence[StartStep]:
        assert (vm_id, bootstrap.token) == ("vm", "secret")
        return [StartStep(name="setup", seconds=1.5, num_bytes=7, source="bucket")]


class OwnError(errors.NoCapacityError):
    """A class that only this provider has."""


def make(settings: dict[str, Any]) -> OddProvider:
    if "refuse" in settings:
        raise errors.MisconfiguredError(settings["refuse"])
    return OddProvider(settings)
