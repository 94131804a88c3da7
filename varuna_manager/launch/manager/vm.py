"""``launch --manager-vm``: rents a small VM and starts the job's manager there.

Every step is recorded before it is taken and may be repeated, so that ``resume`` or
``down`` finds everything after a crash in between. The VM has a lease: one that nobody
finds ends by itself.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError, NoCapacityError, VmNotFoundError
from spottrain.cloud.port.facts import with_attached
from spottrain.cloud.port.provider import LaunchRequest, Offer
from spottrain.cloud.process.child import ChildProvider
from spottrain.cloud.slurm.settings import HERE
from spottrain.cloud.ssh.transport.hosts import Host, HostKeyError
from spottrain.cloud.ssh.transport.shell import Shell
from spottrain.units import DAY_S
from spottrain.varuna_manager.config.clouds import AnyCloud, AwsConfig, AzureConfig
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.config.manager_vm import IDENTITY
from spottrain.varuna_manager.config.slurm import SlurmConfig
from spottrain.varuna_manager.config.ssh import environment_of
from spottrain.varuna_manager.jobs import manager_location, trust
from spottrain.varuna_manager.jobs.bucket import folder_mark
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.manager_location import OwnVm, RemoteManager
from spottrain.varuna_manager.launch.manager.bundle import (
    bundle,
    prepare_script,
    root_of,
    software,
)
from spottrain.varuna_manager.launch.providers import open_cloud, own_network

if TYPE_CHECKING:
    from spottrain.cloud.ssh.transport.bastion import Bastion
    from spottrain.cloud.ssh.transport.remote import Remote
    from spottrain.cloud.ssh.transport.session import Dial

ANSWER_S = 600.0
"""How long the VM may take from its launch until it accepts SSH."""
_PREPARE_S = 900.0
_SEND_S = 300.0
_START_S = 960.0
"""The VM's lease is waited for, then its manager's start."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 5.0
_LONGEST_RUN = {"gcp": {"max_run_s": 120 * DAY_S}}
"""Google limits how long any VM runs; a manager's VM gets the largest limit."""
_UNPACK = """\
set -eu
umask 077
mkdir -p {state}
cd {state}
if [ -e jobs/{name} ]; then
    cat > /dev/null
else
    rm -rf arriving
    mkdir -p arriving jobs
    tar -xzf - -C arriving
    mv arriving/market.sqlite market.sqlite
    mv arriving/jobs/{name} jobs/{name}
fi
"""

Say = Callable[[str], None]


# --- What is asked for ----------------------------------------------------------------


def requests(config: JobConfig, offers: Sequence[Offer], uid: str) -> Iterator[LaunchRequest]:
    """Yield the requests to try, zone by zone, in the cheapest region.

    Args:
        offers: Offers of its cloud to train on.
        uid: The job's unique id.
    """
    cloud = config.clouds[0]
    machine = config.manager_vm.machine(cloud.cloud)
    attached = renting(config).attached_usd_per_hour()
    ranked = sorted(offers, key=lambda one: one.usd_per_hour / max(1, one.gpus))
    region = ranked[0].region
    zones = dict.fromkeys(one.zone for one in ranked if one.region == region)
    for number, zone in enumerate(zones):
        offer = replace(
            ranked[0],
            zone=zone,
            instance_type=machine.instance_type,
            spot=False,
            usd_per_hour=machine.usd_per_hour,
            gpus=0,
            gpu_memory_bytes=0,
            available=None,
            family="",
            device="cpu",
        )
        yield LaunchRequest(
            token=f"{uid}-{tags.MANAGER}-{number}",
            job=config.name,
            intent=tags.MANAGER,
            offer=with_attached(offer, attached),
            count=1,
            lease_s=config.manager_vm.lease_s,
        )


def renting(config: JobConfig) -> AnyCloud:
    """Return the cloud's section for the manager's VM: no GPU, its own image."""
    cloud, manager_vm = config.clouds[0], config.manager_vm
    machine = manager_vm.machine(cloud.cloud, getattr(cloud, "image_owner", ""))
    update: dict[str, Any] = {
        "instance_types": (),
        "gpus": (),
        "image": machine.image,
        "disk_gib": manager_vm.disk_gib,
        IDENTITY[cloud.cloud]: manager_vm.identity,
        **_LONGEST_RUN.get(cloud.cloud, {}),
    }
    if machine.image_owner:
        update["image_owner"] = machine.image_owner
    return cloud.model_copy(update=update)


def config_there(config: JobConfig, manager: RemoteManager) -> JobConfig:
    """Return the job file for the manager on its VM.

    It rents where it can reach the VMs: in its own region, unless a network of the user's
    connects regions.
    """
    cloud = config.clouds[0]
    update: dict[str, Any] = {
        "ssh_from": manager.networks,
        "bastion": None,
        "ssh_proxy": "",
        "owner": cloud.owner or manager.owner,  # its own principal is another
    }
    if isinstance(cloud, AwsConfig):
        update["profile"] = ""  # it uses the VM's role
    if isinstance(cloud, AzureConfig) and not cloud.subscription:
        update["subscription"] = os.environ.get("AZURE_SUBSCRIPTION_ID", "")
    if not cloud.has_own_network:
        region = manager.requests[0].offer.region
        update["regions"] = (region,)
        update["zones"] = tuple(zone for zone in cloud.zones if region in zone)
    return config.model_copy(update={cloud.cloud: cloud.model_copy(update=update)})


# --- Renting and starting -------------------------------------------------------------


def begin(job: JobDir, offers: Sequence[Offer], say: Say) -> None:
    """Rent the VM of a job's manager and start the manager there.

    Args:
        job: The job as submitted here.
        offers: Offers of its cloud to train on.
        say: Called with progress messages.

    Raises:
        CloudError: No VM was rented, or it does not accept SSH.
        ConfigError: This machine lacks something.
    """
    config = job.config()
    cloud = config.clouds[0]
    networks = cloud.ssh_from or own_network(cloud)
    asked = tuple(requests(config, offers, uid_of(job)))
    manager_location.write(job, RemoteManager(requests=asked, networks=networks))
    go_on(job, say)


def go_on(job: JobDir, say: Say) -> None:
    """Continue what ``begin`` has begun; safe to repeat.

    Raises:
        CloudError: As ``begin``.
    """
    manager = manager_location.read(job)
    assert manager is not None, "begin writes it first"
    with _Rental(job, manager, say) as rental:
        rental.rent()
        with rental.enter() as remote:
            start(job, rental.manager, remote, say)


class _Rental:
    """The rental of the manager's VM; holds the cloud open."""

    def __init__(self, job: JobDir, manager: RemoteManager, say: Say) -> None:
        # Not above: paramiko takes longer to import than most commands run.
        from spottrain.cloud.ssh_keys import ensure_key

        self._job, self.manager, self._say = job, manager, say
        self._config = job.config()
        self._key_file, public_key = ensure_key(job.cloud)
        self._cloud: ChildProvider = open_cloud(
            renting(self._config), public_key, manager.networks, uid=uid_of(job)
        )
        self._dial, self._bastion = self._way()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bastion is not None:
            self._bastion.close()
        self._cloud.close()

    def _way(self) -> tuple[Dial, Bastion | None]:
        from spottrain.cloud.ssh.rented.vm import VmAccess

        cloud = self._config.clouds[0]
        bastion = None if cloud.bastion is None else cloud.bastion.host()
        access = VmAccess(key_file=self._key_file, bastion=bastion, proxy=cloud.proxy())
        return access.dial()

    def rent(self) -> None:
        """Rent the VM in the first zone that has one; idempotent.

        Raises:
            CloudError: No zone has one, or the cloud refuses.
        """
        while not self.manager.vm_id:
            request, *others = self.manager.requests
            kind, zone = request.offer.instance_type, request.offer.zone
            self._say(f"renting {kind} in {zone} for the manager")
            try:
                vm, *_ = self._cloud.launch(request).vms
            except NoCapacityError as error:
                if not others:
                    raise
                self._say(f"{error}; trying another zone")
                self._put(replace(self.manager, requests=tuple(others)))
            else:
                self._put(replace(self.manager, vm_id=vm.vm_id, owner=vm.owner))

    def enter(self) -> Remote:
        """Wait until the VM accepts SSH; return the connection.

        Raises:
            VmNotFoundError: It is gone.
            HostKeyError: Its host key is wrong.
            CloudError: It does not accept SSH in time.
        """
        deadline_s, pause_s = time.monotonic() + ANSWER_S, _MIN_PAUSE_S
        while True:
            trouble: CloudError
            try:
                if (remote := self._try()) is not None:
                    return remote
                trouble = CloudError(f"VM {self.manager.vm_id} did not boot in time")
            except (VmNotFoundError, HostKeyError):
                raise
            except CloudError as error:
                trouble = error
            if time.monotonic() > deadline_s:
                raise trouble
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _try(self) -> Remote | None:
        from spottrain.cloud.ssh.transport.remote import Remote

        target = self._cloud.ssh_target(self.manager.vm_id)
        if target is None:
            return None
        self._put(replace(self.manager, target=target))
        return Remote(host_of(self._job, self.manager), self._dial)

    def _put(self, manager: RemoteManager) -> None:
        self.manager = manager
        manager_location.write(self._job, manager)


class Checks(Protocol):
    """A way to run shell commands at a place: ``Remote`` or ``Shell``."""

    def check(self, command: str, data: bytes = b"", timeout_s: float = ...) -> str:
        """Run a command that must succeed; return what it prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a place needs to have a manager."""

    name: str
    root: str
    """From ``root_of``."""
    state: str
    """SPOTTRAIN_HOME there, as a word for the shell."""
    python: str
    extras: tuple[str, ...]
    """Of spottrain, for the cloud or cluster."""
    config: JobConfig
    """The job file there."""
    files: Mapping[str, bytes]
    """Of the job's folder, there alone."""
    keeper: str
    """Starts the manager there, and sees to it that it runs."""
    is_ours: bool
    """The machine is ours alone."""


def start(job: JobDir, manager: RemoteManager, remote: Remote, say: Say) -> None:
    """Start the manager of a job on its VM, unless it already runs there.

    Raises:
        CloudError: The VM is unfit or cannot be reached.
        ConfigError: This machine lacks something.
    """
    config = job.config()
    cloud = config.clouds[0]
    address = remote.check('echo "$SSH_CONNECTION"').split()[2]
    own = OwnVm(vm_id=manager.vm_id, private_address=address)
    site = Site(
        name=f"VM {manager.vm_id}",
        root=root_of(cloud.folder),
        state=f"{root_of(cloud.folder)}/state",
        python=config.manager_vm.python,
        extras=(cloud.cloud,),
        config=config_there(config, manager),
        files={
            "cloud/ssh_key": (job.cloud / "ssh_key").read_bytes(),
            "vm.json": manager_location.own_vm_file(own),
        },
        keeper="spottrain.varuna_manager.daemon.watchdog",
        is_ours=True,
    )
    start_at(job, manager, site, remote, say)


def start_on_login_node(job: JobDir, slurm: SlurmConfig, say: Say) -> None:
    """Bring a job to a login node of its cluster and have its manager started there, as a batch
    job; safe to repeat.

    Raises:
        CloudError: The login node is unfit or cannot be reached.
        ConfigError: This machine lacks something.
        SpottrainError: The cluster does not take the batch job.
    """
    manager = RemoteManager(requests=())
    manager_location.write(job, manager)
    config = job.config()
    here = {"slurm": slurm.model_copy(update={"login": HERE})}
    site = Site(
        name=slurm.login,
        root=root_of(slurm.folder),
        state=_state_of(job, slurm),
        python=slurm.python,
        extras=(),
        config=config.model_copy(update=here),
        files={},
        keeper="spottrain.varuna_manager.launch.manager.batch_job",
        is_ours=False,
    )
    start_at(job, manager, site, _shell(slurm), say)


def clear_login_node(job: JobDir, slurm: SlurmConfig) -> None:
    """Remove the folder of a job that has ended from its cluster.

    Raises:
        CloudError: The login node does not answer.
    """
    _shell(slurm).check(f"rm -rf {_state_of(job, slurm)}")


def _shell(slurm: SlurmConfig) -> Shell:
    return Shell(slurm.login, partial(login_argv, slurm.login), SSH_LOST)


def _state_of(job: JobDir, slurm: SlurmConfig) -> str:
    return f"{root_of(slurm.folder)}/{uid_of(job)}"


def start_at(job: JobDir, manager: RemoteManager, site: Site, remote: Checks, say: Say) -> None:
    """Bring a job to a place and start its manager there, unless it already runs.

    Raises:
        CloudError: The place is unfit or cannot be reached.
        ConfigError: This machine lacks something.
    """
    config, name = job.config(), shlex.quote(job.name)
    say(f"{site.name}: preparing it for the manager")
    ours = software()
    people = ("apprise",) if config.notify.apprise else ()
    extras = (*site.extras, *config.track.asked, *people)
    script = prepare_script(site.root, site.python, extras, ours, is_ours=site.is_ours)
    remote.check(script, ours, _PREPARE_S)
    folder_mark(job)
    there = site.config.model_dump_json(indent=2).encode()
    given = bundle(job, there, site.files)
    remote.check(_UNPACK.format(state=site.state, name=name), given, _SEND_S)
    environment = environment_of(config.env, config.secrets)
    said = remote.check(
        f"SPOTTRAIN_HOME={site.state} {site.root}/run {site.keeper} {site.state}/jobs/{name}",
        json.dumps(dict(environment)).encode(),
        _START_S,
    )
    for line in said.splitlines():
        say(line)
    manager_location.write(job, replace(manager, started=True))
    say(f"{site.name}: the manager of job {job.name} runs there")
    say(f"if it is lost, on another machine: {trust.how_to_move(job, there)}")


SSH_LOST = 255
"""Exit code of ``ssh`` when it cannot connect or loses the connection."""
_SSH_OPTIONS = ("LogLevel=ERROR", "ConnectTimeout=10", "ServerAliveInterval=15")


def login_argv(login: str, command: str, *, terminal: bool = False) -> list[str]:
    """Return the command line that runs a shell command on a login node."""
    options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
    return ["ssh", "-t" if terminal else "-T", *options, "--", login, command]


def host_of(job: JobDir, manager: RemoteManager) -> Host:
    """Return the manager's VM as an SSH host; its ``target`` must be known."""
    target = manager.target
    assert target is not None, "it is known before anybody enters"
    return Host(
        name=manager.vm_id,
        address=target.host,
        port=target.port,
        user=target.user,
        host_keys=target.host_keys,
        key_file=job.cloud / "ssh_key",
    )


def run_there(job: JobDir, argv: Sequence[str]) -> str:
    """Return the shell command that runs one of our commands where the manager of a job is."""
    config = job.config()
    if isinstance(config.cluster, SlurmConfig):
        root, state = root_of(config.cluster.folder), _state_of(job, config.cluster)
    else:
        root = root_of(config.clouds[0].folder)
        state = f"{root}/state"
    return command_at(root, state, argv)


def command_at(root: str, state: str, argv: Sequence[str]) -> str:
    """Return the shell command that runs one of our commands at a site; see ``Site``."""
    cli = f"{root}/run spottrain.varuna_manager.cli.main"
    return f"SPOTTRAIN_HOME={state} {cli} {shlex.join(argv)}"
