"""Checks of machines and cloud accounts before anything is rented."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spottrain import machine
from spottrain.cloud.aws.settings import IMAGE_NAME as AWS_IMAGE
from spottrain.cloud.azure.settings import IMAGE as AZURE_IMAGE
from spottrain.cloud.gcp.settings import IMAGE as GCP_IMAGE
from spottrain.cloud.port.errors import CloudError, MisconfiguredError
from spottrain.cloud.port.provider import (
    CloudProvider,
    Finding,
    Offer,
    run_check,
)
from spottrain.errors import CapacityError, ConfigError, SpottrainError
from spottrain.gpus.builds import (
    CU126,
    PYPI,
    TorchBuild,
    UnfitBuildError,
    build_of,
    check_driver,
    choose_build,
)
from spottrain.gpus.find import VmDevices, find_devices, own_gpus
from spottrain.morphing.memory.room import megabytes
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.history import HistoryError
from spottrain.pricing.ranking.quotas import with_quotas
from spottrain.units import counted
from spottrain.varuna_manager.config.clouds import AnyCloud
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.config.manager_vm import IDENTITY
from spottrain.varuna_manager.jobs.vm_history import open_history
from spottrain.varuna_manager.launch.providers import open_cloud, own_network
from spottrain.wire.messages import GpuSick, VmUnfit

SSH = 22
_PUBLIC_HOST = "github.com"
"""Accepts SSH and HTTPS from everywhere; only connected to."""
_CONNECT_S = 5.0
OffersAndMessages = tuple[Sequence[Offer], list[str]]


def before_launch(clouds: Sequence[AnyCloud], max_vms: int = 1) -> OffersAndMessages:
    """Return the clouds' offers for a job, and messages about the clouds.

    Clouds are asked at the same time. One that can be used is enough; what is wrong with
    the others is reported.

    Args:
        clouds: Their sections of the job file.
        max_vms: VMs that the job may have.

    Raises:
        ConfigError: who may enter the VMs is not named and cannot be found out.
        CloudError: Something that the job needs is missing or not allowed.
        CapacityError: Nothing that the job wants is offered.
    """
    with ThreadPoolExecutor(len(clouds)) as threads:
        answers = tuple(threads.map(lambda cloud: _offers_or_error(cloud, max_vms), clouds))
    troubles = [answer for answer in answers if isinstance(answer, SpottrainError)]
    if len(troubles) == len(answers):
        raise troubles[0]
    offers: list[Offer] = []
    lines = [f"continuing without this cloud: {trouble}" for trouble in troubles]
    for answer in answers:
        if not isinstance(answer, SpottrainError):
            offers += answer[0]
            lines += answer[1]
    return offers, lines


def _offers_or_error(cloud: AnyCloud, max_vms: int) -> OffersAndMessages | SpottrainError:
    """Return what one cloud offers, or what is wrong with it."""
    try:
        return _offers_of(cloud, max_vms)
    except SpottrainError as error:
        return error


def _offers_of(cloud: AnyCloud, max_vms: int) -> OffersAndMessages:
    lines = [f"{cloud.cloud}: {ssh_access(cloud)}"]
    provider = open_cloud(cloud)
    try:
        found = provider.check()
        if wrong := blocking(found):
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise CloudError(
                f"{cloud.cloud} {wrong[0].what}: {wrong[0].message}{more}; 'spottrain "
                "doctor' lists all problems"
            )
        lines += [f"{cloud.cloud} {x.what}: {x.message}" for x in found if not x.ok]
        offers = provider.offers()
        _remember_pools(provider, max_vms)
    finally:
        provider.close()
    if not any(offer.spot for offer in offers):
        raise CapacityError(_why_none(cloud))
    zones = len({offer.zone for offer in offers})
    return offers, [
        f"{cloud.cloud}: {counted(len(offers), 'offer')} in {counted(zones, 'zone')}",
        *lines,
    ]


def _remember_pools(provider: CloudProvider, max_vms: int) -> None:
    """Record what a cloud says of its spot VMs: plans are made with it."""
    with contextlib.suppress(CloudError, HistoryError):  # plans do without
        pools = provider.spot_pools(max_vms)
        with open_history() as history:
            history.record_pools(pools, time.time())


def check_here(config: JobConfig) -> str:
    """Check the devices of this machine, which the local provider rents out.

    Returns:
        What its workers will compute on.

    Raises:
        CloudError: Its GPUs cannot be used.
    """
    found = _devices_here(config, max((zone.slots for zone in config.zones), default=1))
    if not isinstance(found, VmDevices):
        raise CloudError(f"this machine: {found.reason}")
    return "; ".join((f"computes on {found.name}", *_limits(found), *found.warnings))


def _limits(found: VmDevices) -> Iterator[str]:
    """Yield how a container or the system limits what this machine has."""
    cores, all_cores = machine.cores(), os.cpu_count() or 1
    if cores < all_cores:
        yield f"may use {cores} of {all_cores} cores"
    locked_bytes = machine.locked_memory_bytes(raised=True)
    if found.gpus and locked_bytes:
        yield (
            f"may page-lock {megabytes(locked_bytes)} (ulimit -l); whether the driver locks "
            "more is tried when a VM starts"
        )


def _devices_here(config: JobConfig, slots: int = 1) -> VmDevices | VmUnfit | GpuSick:
    """Return what a VM on this machine would compute on, or why it must not."""
    return find_devices(
        config.device, "", slots, job=config.name, precision=config.precision, is_own=True
    )


def check_kernels(config: JobConfig, kernels: str | None) -> None:
    """Check that what a job's bits were computed on can be had, as far as one can know without
    renting: which CPU a cloud gives, and the build of torch there, VMs say.

    Args:
        kernels: As in ``Numerics``; None: nothing is settled.

    Raises:
        ConfigError: The job would compute on others.
    """
    if kernels is None:
        return
    if config.resources.provider == "local":
        found = _devices_here(config)
        if not isinstance(found, VmDevices):
            return  # for a reason of its own, that VMs tell
        models = {gpu.name for gpu in own_gpus()} if found.gpus else {machine.cpu_name(found.name)}
        if any(kernels.startswith(f"{model} with ") for model in models):
            return
        got = f"this machine has {' and '.join(sorted(models))}"
    else:
        named = [gpu for gpu in config.gpu_types if gpu is not None]
        if not named or None in config.gpu_types or any(one.may_be(kernels) for one in named):
            return
        got = f"the job file names {', '.join(dict.fromkeys(gpu.name for gpu in named))}"
    raise ConfigError(
        f"reduction: exact: the weights were computed on {kernels}, others round differently: "
        f"{got}; go on where there are the same, or begin a new job with init_from"
    )


def has_known_gpu(config: JobConfig) -> bool:
    """Return whether measuring a job here says something about a cloud's GPUs."""
    found = _devices_here(config)
    known = catalogue().gpu_of(found.name) if isinstance(found, VmDevices) else None
    return known is not None and known.compute_capability > 0


def check_build(config: JobConfig) -> list[str]:
    """Check that the torch of a job's VMs runs on the GPUs and drivers that it names.

    Returns:
        A line for each instance type that is left out, and one about torch.

    Raises:
        ConfigError: It does not run there.
    """
    lines = [f"{name} is left out: {why}" for name, why in config.slow_types.items()]
    build = build_in_setup(config)
    for cloud in config.clouds:
        gpus = {
            kind.gpu.name: kind.gpu.compute_capability
            for kind in cloud.machines()
            if kind.device == "gpu"
        }
        if build is None and not has_torch(cloud.image):
            lines.append(_no_torch(cloud, config.setup))
        if undriven := sorted(gpus.keys() & _NO_DRIVER.get(cloud.image, set())):
            lines.append(
                f"{cloud.cloud}: WARNING: no driver: the image {cloud.image} has none for "
                f"{', '.join(undriven)}; such VMs are paid for and returned: leave them "
                f"out of {cloud.cloud}.gpus, or give another image"
            )
        driver = driver_of_image(cloud.cloud, cloud.image)
        needed = choose_build(driver, gpus.values())
        if not gpus:
            continue
        if build is None and has_torch(cloud.image):
            lines.append(f"{cloud.cloud}: torch is in the image {cloud.image}")
            continue
        if build is None:
            what = "none that is published" if needed is None else str(needed)
            lines.append(f"{cloud.cloud}: torch that runs on {', '.join(gpus)}: {what}")
            continue
        try:
            check_driver(build, driver, gpus.values())
        except UnfitBuildError as error:
            raise ConfigError(f"{cloud.cloud}: {', '.join(gpus)}: {error} in setup") from error
        lines.append(f"{cloud.cloud}: {build} runs on {', '.join(gpus)}")
    return lines


def check_bucket_access(config: JobConfig) -> list[str]:
    """Return a warning for each cloud whose VMs have no lasting access to the checkpoints.

    Only what a job file says is looked at; whether a role may write there is not.
    """
    path = str(config.checkpoint.path or "")
    scheme = path.partition("://")[0]
    if scheme not in _BUCKETS:
        return []
    home, keys = _BUCKETS[scheme]
    given = {*config.secrets, *config.env}
    lines = []
    if scheme == "s3" and _SESSION in given:
        lines.append(
            f"WARNING: {_SESSION} expires within hours, and VMs cannot save checkpoints "
            "from then on: give them a role instead (aws.instance_profile), or keys that "
            "last"
        )
    for cloud in config.clouds:
        key, is_home = IDENTITY[cloud.cloud], cloud.cloud == home
        if given.isdisjoint(keys) and not (is_home and getattr(cloud, key)):
            what = f"give {cloud.cloud}.{key}, or " if is_home else ""
            lines.append(
                f"{cloud.cloud}: WARNING: VMs have no credentials for {path}: {what}name "
                f"{keys[0]} under secrets"
            )
    return lines


_SESSION = "AWS_SESSION_TOKEN"
_BUCKETS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "s3": ("aws", ("AWS_ACCESS_KEY_ID", "AWS_PROFILE")),
    "gs": (
        "gcp",
        (
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
    ),
    "az": (
        "azure",
        (
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_SAS_KEY",
            "AZURE_STORAGE_CLIENT_ID",
            "AZURE_CLIENT_ID",
        ),
    ),
}
"""By scheme: the cloud whose VMs have roles there, and variables with credentials."""


def build_in_setup(config: JobConfig) -> TorchBuild | None:
    """Return the build of torch that a job's setup installs, as far as one can see.

    From ``setup`` and the requirements files that it names: PyPI's unless the index of
    another build is named. None: it installs nothing, torch is in the image.
    """
    texts = [config.setup]
    for name in re.findall(r"(?:-r|--requirement)[ =]*(\S+)", config.setup):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts.append((Path(config.workdir) / name).read_text())
    text = "\n".join(texts)
    if "whl/cu126" in text or "+cu126" in text:
        return CU126
    other = re.search(r"(?:whl/|\+)cu(\d\d)(\d)\b", text)
    if other is not None:
        return build_of(f"{other[1]}.{other[2]}")
    return PYPI if re.search(r"\btorch\b", text) else None


def has_torch(image: str) -> bool:
    """Return whether an image holds torch, as far as its name says."""
    return "pytorch" in image.lower()


def _no_torch(cloud: AnyCloud, setup: str) -> str:
    known = "has none" if cloud.image in _IMAGES else "may have none"
    what = "setup does not name torch" if setup else "there is no setup"
    return (
        f"{cloud.cloud}: WARNING: no torch: the image {cloud.image} {known}, and {what}; "
        "VMs without torch are paid for and returned: set 'setup: pip install torch "
        "safetensors', or give an image that has it"
    )


_NO_DRIVER = {AZURE_IMAGE: {"A10", "V100-PCIE", "V100-32GB"}}
"""GPUs without a working driver in an image: V100 has an image of its own (azhpc-images,
README), A10 of NVads_A10_v5 needs the GRID driver (azhpc-extensions, NvidiaGPU)."""
_IMAGES = (AWS_IMAGE, AZURE_IMAGE, GCP_IMAGE)
_IMAGE_DRIVERS = {AWS_IMAGE: "595.91", AZURE_IMAGE: "580"}
"""Of images whose names do not say: AWS's release notes, September 2026; azhpc-images
#478 and #488."""


def driver_of_image(cloud: str, image: str) -> str:
    """Return the NVIDIA driver of an image, as far as it is known; else empty.

    Google's names end in it (``...-nvidia-580``).
    """
    found = re.search(r"-nvidia-(\d+)$", image) if cloud == "gcp" else None
    return found[1] if found else _IMAGE_DRIVERS.get(image, "")


def blocking(found: Iterable[Finding]) -> list[Finding]:
    """Return the failed findings that keep a job from renting."""
    found = tuple(found)
    met = {one.one_of for one in found if one.ok and one.one_of}
    return [one for one in found if not one.ok and one.one_of not in met]


def _why_none(cloud: AnyCloud) -> str:
    return (
        f"{cloud.cloud}: no spot price is known for {', '.join(cloud.kinds())} in "
        f"{', '.join(cloud.regions)}; run 'spottrain prices --cloud {cloud.cloud}', or "
        "name other types or regions"
    )


def findings(cloud: AnyCloud, max_vms: int = 0) -> Iterator[Finding]:
    """Yield findings about a cloud account, the most basic first.

    Args:
        cloud: Its section of a job file.
        max_vms: VMs that the job may have; 0: there is no job.
    """
    try:
        provider = open_cloud(cloud)
    except CloudError as error:
        yield Finding(what="credentials", ok=False, message=str(error))
        return
    try:
        found = provider.check()
        if max_vms and not blocking(found):
            offers = run_check("offers", lambda: _spot_offers(provider, cloud))
            found = (*found, offers)
            if offers.ok:
                enough = run_check("quotas", lambda: _enough(provider, max_vms))
                found = (*found, enough)
            _remember_pools(provider, max_vms)
    finally:
        provider.close()
    yield from found
    if any(each.ok for each in found):
        yield run_check("SSH", lambda: ssh_access(cloud))
        if (
            cloud.public_addresses
            and cloud.bastion is None
            and not cloud.ssh_proxy
            and cloud.ssh_port == SSH
        ):
            yield run_check("port 22", lambda: outbound_ssh(_PUBLIC_HOST))


def has_login(cloud: str) -> bool:
    """Return whether this machine has a cloud's SDK, and credentials, good or bad.

    Only where the SDK looks for them is looked at; those of a cloud's own VMs are not seen.
    """
    try:
        version(_SDKS[cloud])
    except PackageNotFoundError:
        return False
    variables, files = _LOGINS[cloud]
    return any(os.environ.get(name) for name in variables) or any(
        Path(os.environ.get(variable) or usual, name).expanduser().exists()
        for variable, usual, name in files
    )


_SDKS = {"aws": "boto3", "azure": "azure-identity", "gcp": "google-cloud-compute"}
_LOGINS: Mapping[str, tuple[tuple[str, ...], tuple[tuple[str, str, str], ...]]] = {
    "aws": (
        ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        (
            ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", ""),
            ("AWS_CONFIG_FILE", "~/.aws/config", ""),
        ),
    ),
    "azure": (
        ("AZURE_CLIENT_ID", "AZURE_SUBSCRIPTION_ID"),
        (("AZURE_CONFIG_DIR", "~/.azure", "azureProfile.json"),),
    ),
    "gcp": (
        ("GOOGLE_APPLICATION_CREDENTIALS",),
        (
            (
                "CLOUDSDK_CONFIG",
                "~/.config/gcloud",
                "application_default_credentials.json",
            ),
        ),
    ),
}
"""Variables with credentials; and files of them: a variable with the file or its folder, the
usual one, and the file in it."""


def outbound_ssh(host: str, ssh_port: int = SSH, web_port: int = 443) -> str:
    """Return whether SSH connections get out of this machine's network.

    Args:
        host: A public host that accepts both SSH and HTTPS.
        ssh_port: Where it accepts SSH.
        web_port: Where it accepts HTTPS; if that fails too, nothing is known.

    Raises:
        CloudError: They do not.
    """
    if _connects(host, ssh_port):
        return f"connections to port {ssh_port} get out of this network"
    if not _connects(host, web_port):
        return f"not tried: {host} does not answer from here"
    raise CloudError(
        f"this network lets no connection out to port {ssh_port} ({host}): VMs could not "
        "be entered; use a bastion, another network, or --manager-vm from one"
    )


def _connects(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), _CONNECT_S):
            return True
    except OSError:
        return False


def _spot_offers(provider: CloudProvider, cloud: AnyCloud) -> str:
    """Return how many spot VMs could be chosen from.

    Raises:
        MisconfiguredError: there is none, so a launch would be refused.
    """
    zones = [offer.zone for offer in provider.offers() if offer.spot]
    if not zones:
        raise MisconfiguredError(_why_none(cloud))
    return f"{len(zones)} of spot VMs in {counted(len(set(zones)), 'zone')}"


def _enough(provider: CloudProvider, max_vms: int) -> str:
    """Return for how many VMs of a job the quotas are enough, in the best region."""
    offers = with_quotas(provider.offers(), provider.quotas(), catalogue(), unused=True)
    regions: dict[str, dict[str, int]] = {}
    for offer in offers:
        if offer.spot and offer.quota_vms is not None:
            kinds = regions.setdefault(offer.region, {})
            kinds[offer.instance_type] = int(offer.quota_vms)
    if not regions:
        return "not known for these types; a refused request is halved"
    best = {
        region: max(kinds.items(), key=lambda item: item[1])
        for region, kinds in sorted(regions.items())
    }
    lines = [
        f"{region}: enough for {min(most, max_vms)} of your {max_vms} spot VMs ({kind})"
        for region, (kind, most) in best.items()
    ]
    return "; ".join(lines)


def ssh_access(cloud: AnyCloud) -> str:
    """Return how this machine reaches VMs.

    Raises:
        ConfigError: It cannot: a tool is missing, or its own address is unknown.
    """
    networks = cloud.ssh_from or own_network(cloud)
    if cloud.ssh_proxy:
        for tool in cloud.proxy_tools:
            if shutil.which(tool) is None:
                raise ConfigError(
                    f"{cloud.cloud}.ssh_proxy needs the command {tool} on this machine; "
                    "install it (docs/clouds/{cloud.cloud}.md), or leave ssh_proxy out"
                )
        return f"VMs are reached with {' and '.join(cloud.proxy_tools)}"
    if cloud.bastion is not None:
        return f"VMs are reached through {cloud.bastion.address}"
    if not cloud.public_addresses:
        return "VMs have no public address; this machine must be in their network"
    return f"VMs will accept SSH from {', '.join(networks)}"
