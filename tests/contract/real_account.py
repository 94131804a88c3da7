"""A real account under contract: ``scripts/test --cloud aws --max-usd 2``.

Everything that is rented is given back after each test, and once more at the end
whatever carries this run's tag. Where credentials are found, what region and type are
taken, and where the cloud answers, is told like in a job file: ``--cloud-settings FILE``
holds such a section, without its name.
"""

from __future__ import annotations

import itertools
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.contract.account import Account
from tests.contract.spending_cap import MAX_VM_S, MIN_BILLED_S, Capped, SpendingCap

from spottrain.cloud.port.provider import (
    CloudProvider,
    Offer,
    VmState,
)
from spottrain.cloud.ssh_keys import ensure_key
from spottrain.varuna_manager.config.clouds import (
    AnyCloud,
    AwsConfig,
    AzureConfig,
    GcpConfig,
)
from spottrain.varuna_manager.config.files import read_job_file
from spottrain.varuna_manager.launch.providers import open_cloud

_ALIVE = (VmState.STARTING, VmState.RUNNING)
_CLIENTS = 2
"""Of which each ``connect`` returns the next: starting one takes seconds."""
VMS = 8
"""The VMs that the suite rents, all tests together."""
_CONFIGS: dict[str, type[AwsConfig | AzureConfig | GcpConfig]] = {
    "aws": AwsConfig,
    "azure": AzureConfig,
    "gcp": GcpConfig,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "aws": {"instance_types": ["g4dn.xlarge"]},
    "azure": {"instance_types": ["Standard_NC4as_T4_v3"]},
    "gcp": {"instance_types": ["g2-standard-4"], "max_run_s": MAX_VM_S},
}
"""Small types with a GPU, since others are not in the catalogue; GCP's hard stop."""
_NOBODY = "192.0.2.0/24"
"""A network for documentation: nobody may enter the VMs."""


@dataclass
class RealCloud:
    """One account for one run."""

    clients: Sequence[CloudProvider]
    spending_cap: SpendingCap
    markets: frozenset[bool] = frozenset({True})
    """Markets with offers: not all prices are always known."""
    run: str = field(default_factory=lambda: f"contract-{uuid.uuid4().hex[:8]}")
    """Prefix of the names of the run's jobs."""

    def account(self) -> Iterator[Account]:
        """Open an account for a job of its own; in the end return all that it has."""
        job = f"{self.run}-{uuid.uuid4().hex[:6]}"
        takers = itertools.cycle([Capped(one, self.spending_cap) for one in self.clients])
        provider = next(takers)
        try:
            yield Account(
                lambda: next(takers),
                job,
                capacity=0,
                markets=self.markets,
                left=lambda: [vm.vm_id for vm in provider.list_vms(job) if vm.state in _ALIVE],
            )
        finally:
            alive = [vm.vm_id for vm in provider.list_vms(job) if vm.state in _ALIVE]
            provider.terminate(alive)
            provider.release(job)

    def sweep(self) -> list[str]:
        """Return whatever still carries the run's tag; name it."""
        first = self.clients[0]
        ours = [vm for vm in first.list_all() if vm.job.startswith(self.run)]
        alive = [vm for vm in ours if vm.state in _ALIVE]
        first.terminate([vm.vm_id for vm in alive])
        for job in sorted({vm.job for vm in ours}):
            first.release(job)
        return [vm.vm_id for vm in alive]


def wanted(config: pytest.Config) -> str:
    """Return the cloud that the suite is to run on for real, empty if on none."""
    return str(config.getoption("cloud", None) or "")


def add_options(parser: pytest.Parser) -> None:
    """Add the command line's options."""
    group = parser.getgroup("real clouds")
    clouds = list(_CONFIGS)
    group.addoption("--cloud", choices=clouds, help="run on this real account")
    group.addoption("--max-usd", type=float, help="what that may cost at most")
    group.addoption("--cloud-settings", type=Path, help="a job file's section of it")


def check_options(config: pytest.Config) -> None:
    """Refuse to begin without a cap, and where nobody watches.

    Raises:
        pytest.UsageError: it is so.
    """
    cap_usd = config.getoption("max_usd", None)
    if not wanted(config):
        return
    if cap_usd is None or not cap_usd > 0:
        raise pytest.UsageError("--cloud spends money: say how much it may be, such as --max-usd 2")
    if os.environ.get("CI"):
        raise pytest.UsageError("--cloud spends money: not in CI (CI is set)")
    try:
        settings(config)
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--cloud-settings: {error}") from None


def settings(config: pytest.Config) -> AnyCloud:
    """Return what the account is asked for.

    Raises:
        ValueError: the settings are wrong.
    """
    cloud = wanted(config)
    file: Path | None = config.getoption("cloud_settings", None)
    told = read_job_file(file)[0] if file is not None else {}
    known = {"ssh_from": [_NOBODY], **_DEFAULTS[cloud]}
    if cloud == "gcp":
        known["project"] = os.environ.get("GOOGLE_CLOUD_PROJECT", "")
    return _CONFIGS[cloud].model_validate_json(json.dumps({**known, **told}))


@contextmanager
def real_cloud(
    config: pytest.Config, folder: Path, say: Callable[[str], None]
) -> Iterator[RealCloud]:
    """Open the account, say what it may cost, and leave it empty.

    Raises:
        pytest.UsageError: even the least would cost more than the cap.
    """
    made, cap_usd = settings(config), float(config.getoption("max_usd"))
    _, public_key = ensure_key(folder)
    with ExitStack() as stack:
        clients = [open_cloud(made, public_key) for _ in range(_CLIENTS)]
        for client in clients:
            stack.callback(client.close)
        offers = clients[0].offers()
        if not offers:
            raise pytest.UsageError(f"{made.cloud} offers none of {made.kinds()}")
        markets = frozenset(offer.spot for offer in offers)
        cloud = RealCloud(clients, SpendingCap(cap_usd), markets)
        say(_estimate(min(offers, key=lambda one: one.usd_per_hour), cap_usd))
        try:
            yield cloud
        finally:
            left = cloud.sweep()
            say(f"it cost about {cloud.spending_cap.max_usd:.2f} USD")
            assert left == [], f"had to be swept up: {left}"


def _estimate(offer: Offer, cap_usd: float) -> str:
    """Return what a run costs if all goes well, and what it can never exceed."""
    usual_usd = VMS * offer.usd_per_hour * 5 * MIN_BILLED_S / 3600
    return (
        f"rents {VMS} {offer.instance_type} in {offer.zone}, one or two at a time, for "
        f"minutes each: about {usual_usd:.2f} USD at {offer.usd_per_hour:g} USD/h, "
        f"never above {cap_usd:g} USD"
    )
