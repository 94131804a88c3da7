"""Which build of torch runs on which driver and GPU; pure.

Sources: the architectures of torch's builds, pytorch#178665, #187075 and #197555 (2.12 to
2.14 share one matrix); the drivers of CUDA releases, NVIDIA's CUDA compatibility guide.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from spottrain.errors import SpottrainError
from spottrain.wire.model import Precision
from spottrain.wire.plan import Semantics

BF16_CAPABILITY = 80
"""From Ampere on tensor cores compute in bfloat16 (CUDA C++ programming guide, compute
capabilities)."""
_FIRST_MATRIX_UNITS = 70
"""From Volta on they compute in fp16 (the same table)."""


class UnfitBuildError(SpottrainError):
    """A build of torch does not run on a driver or a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """A build of torch."""

    cuda: str
    """Version of CUDA that it was built with; empty: for CPUs."""
    min_driver: int
    """Major version of the oldest driver that runs it."""
    capabilities: tuple[int, ...]
    """Architectures that it holds kernels for, ascending, ten times major plus minor."""

    def __str__(self) -> str:
        """Return its name for people."""
        return f"torch for CUDA {self.cuda}" if self.cuda else "torch for CPUs"

    def runs_on(self, capability: int) -> bool:
        """Return whether it has kernels for a GPU.

        Kernels for one minor version run on later ones of the same major version (CUDA
        C++ programming guide, binary compatibility).
        """
        return any(capability // 10 == one // 10 and capability >= one for one in self.capabilities)


PYPI = TorchBuild(cuda="13.0", min_driver=580, capabilities=(75, 80, 86, 90, 100, 120))
"""Installed by ``pip install torch``, versions 2.12 to 2.14."""
CU126 = TorchBuild(cuda="12.6", min_driver=525, capabilities=(50, 60, 70, 75, 80, 86, 90))
"""On PyTorch's own index alone: ``pip install torch --index-url
https://download.pytorch.org/whl/cu126``. RFC pytorch#190385 ends it with torch 2.15."""
_FIRST_TURING, _LAST_FOR_VOLTA = 75, 580
"""The driver branch 580 is the last one for GPUs older than Turing (NVIDIA's notes on
branch 580; NixOS keeps it as ``legacy_580``)."""
_MIN_DRIVER = {"11": 450, "12": 525, "13": 580}
"""Major version of the oldest driver, by the major version of CUDA (CUDA compatibility
guide, minor version compatibility)."""


def build_of(cuda: str, capabilities: Iterable[int] = ()) -> TorchBuild:
    """Return the build of torch that was built with a version of CUDA.

    Args:
        cuda: ``torch.version.cuda``; empty: a build for CPUs.
        capabilities: What torch says that it holds kernels for. None: as published, or
            unknown for builds that are in no table here.
    """
    known = next((one for one in (PYPI, CU126) if one.cuda == cuda), None)
    if known is not None and not capabilities:
        return known
    min_driver = _MIN_DRIVER.get(cuda.partition(".")[0], 0)
    return TorchBuild(cuda=cuda, min_driver=min_driver, capabilities=tuple(sorted(capabilities)))


def capabilities_of(arch_flags: str) -> tuple[int, ...]:
    """Return architectures as ``torch._C._cuda_getArchFlags`` lists them.

    Such as ``sm_75 sm_90a compute_120``.
    """
    found = re.findall(r"\bsm_(\d+)", arch_flags)
    return tuple(sorted(set(map(int, found))))


def driver_major(driver: str) -> int:
    """Return the major version of a driver; 0 if it is not one."""
    major = driver.partition(".")[0]
    return int(major) if major.isdigit() else 0


def check_driver(build: TorchBuild, driver: str, capabilities: Iterable[int] = ()) -> None:
    """Check that a build of torch runs on a driver and on GPUs.

    Args:
        build: Of torch.
        driver: Its version; empty: unknown.
        capabilities: Compute capabilities of the GPUs, ten times major plus minor.

    Raises:
        UnfitBuildError: It does not; says which build would.
    """
    needed = sorted(set(capabilities))
    if not build.cuda:
        raise UnfitBuildError(
            f"this torch is built for CPUs: {advice(driver, needed)}, or set resources.device: cpu"
        )
    major = driver_major(driver)
    if driver and major < build.min_driver:
        raise UnfitBuildError(
            f"{build} needs driver {build.min_driver} or newer: got "
            f"{driver}; {advice(driver, needed)}"
        )
    if needed and needed[0] < _FIRST_TURING and major > _LAST_FOR_VOLTA:
        raise UnfitBuildError(
            f"driver {driver} does not know sm_{needed[0]} any more; take branch "
            f"{_LAST_FOR_VOLTA} or older"
        )
    if not build.capabilities:
        return
    for capability in needed:
        if not build.runs_on(capability):
            raise UnfitBuildError(
                f"{build} has no kernels for sm_{capability}: it has "
                f"{', '.join(f'sm_{one}' for one in build.capabilities)}; "
                f"{advice(driver, needed)}"
            )


def choose_build(driver: str, capabilities: Iterable[int]) -> TorchBuild | None:
    """Return the build to install; PyPI's if it runs, None if none does.

    Args:
        driver: Oldest version in the fleet; empty: unknown, taken as new enough.
        capabilities: Compute capabilities of all its GPUs.
    """
    needed = tuple(capabilities)
    for build in (PYPI, CU126):
        if _runs(build, driver, needed):
            return build
    return None


def _runs(build: TorchBuild, driver: str, capabilities: tuple[int, ...]) -> bool:
    if not driver:
        return all(map(build.runs_on, capabilities))
    old = min(capabilities, default=_FIRST_TURING) < _FIRST_TURING
    return (
        driver_major(driver) >= build.min_driver
        and not (old and driver_major(driver) > _LAST_FOR_VOLTA)
        and all(map(build.runs_on, capabilities))
    )


def advice(driver: str, capabilities: Iterable[int]) -> str:
    """Return what to install, as the end of an error."""
    needed = tuple(capabilities)
    build = choose_build(driver, needed)
    if build is PYPI:
        return "install PyPI's torch"
    if build is CU126:
        return "install torch from https://download.pytorch.org/whl/cu126"
    if choose_build("", needed) is not None:
        return f"install another driver ({CU126.min_driver} at least)"
    return "no build of torch runs on all of these GPUs; use GPUs of fewer generations"


def automatic_precision(capabilities: Collection[int], semantics: Semantics) -> Precision:
    """Return the type of matrix multiplications that is fast on all of a job's GPUs.

    Matrix units compute in fp16 since Volta and in bf16 since Ampere, both many times
    faster than in fp32 (NVIDIA's data sheets). bf16 needs no scaling of the loss, which
    gradients that are stale by one mini-batch would follow too late.

    Args:
        capabilities: Compute capabilities, ten times major plus minor; none: on CPUs. 0:
            unknown.
        semantics: Of the job.
    """
    least = min(capabilities, default=0)
    if least >= BF16_CAPABILITY:
        return "bf16"
    return "fp16" if least >= _FIRST_MATRIX_UNITS and semantics == "synchronous" else "fp32"


def check_precision(precision: Precision, capability: int, gpu: str) -> None:
    """Check that a GPU computes in a precision at the speed that is paid for.

    Raises:
        UnfitBuildError: bfloat16 on a GPU that would emulate it.
    """
    if precision == "bf16" and capability < BF16_CAPABILITY:
        raise UnfitBuildError(f"runtime.precision: {gpu} (sm_{capability}) has no bf16; use fp16")
