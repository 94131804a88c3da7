"""Which torch runs on which driver and GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.gpus.builds import (
    CU126,
    PYPI,
    UnfitBuildError,
    build_of,
    capabilities_of,
    check_driver,
    check_precision,
    choose_build,
)

CAPABILITIES = [60, 70, 75, 80, 86, 89, 90, 100, 103, 120]
drivers = st.integers(450, 620).map(lambda major: f"{major}.10.01")
fleets = st.sets(st.sampled_from(CAPABILITIES), min_size=1)


def runs(build: object, driver: str, fleet: set[int]) -> bool:
    try:
        check_driver(build, driver, fleet)  # type: ignore[arg-type]
    except UnfitBuildError:
        return False
    return True


@given(drivers, fleets)
def test_the_build_that_is_chosen_runs_and_none_is_chosen_if_none_does(
    driver: str, fleet: set[int]
) -> None:
    build = choose_build(driver, fleet)
    if build is None:
        assert not runs(PYPI, driver, fleet)
        assert not runs(CU126, driver, fleet)
    else:
        assert runs(build, driver, fleet)
        assert build is PYPI or not runs(PYPI, driver, fleet)


@pytest.mark.parametrize(
    ("driver", "capability", "pypi", "cu126"),
    [
        ("580.95.05", 70, False, True),  # V100
        ("570.195.03", 70, False, True),
        ("580.95.05", 75, True, True),  # T4
        ("580.95.05", 86, True, True),  # A10G
        ("580.95.05", 89, True, True),  # L4 runs sm_86
        ("570.86", 90, False, True),  # H100 with a driver before CUDA 13
        ("595.91", 90, True, True),
        ("595.91", 100, True, False),  # B200
        ("595.91", 120, True, False),
        ("520.61", 80, False, False),
        ("595.91", 70, False, False),  # Volta ends with branch 580
    ],
)
def test_builds_run_where_their_tables_say(
    driver: str, capability: int, pypi: bool, cu126: bool
) -> None:
    assert runs(PYPI, driver, {capability}) == pypi
    assert runs(CU126, driver, {capability}) == cu126


@pytest.mark.parametrize(
    ("build", "driver", "fleet", "words"),
    [
        (PYPI, "580.1", [70], "no kernels for sm_70: .*install torch from https://"),
        (PYPI, "570.1", [86], "needs driver 580 or newer: got 570.1; install torch"),
        (CU126, "520.1", [86], "driver 525 or newer: got 520.1; install another"),
        (CU126, "595.1", [100], "no kernels for sm_100.*install PyPI's torch"),
        (PYPI, "580.1", [70, 100], "no build of torch runs on all of these"),
        (CU126, "595.1", [70], "driver 595.1 does not know sm_70 any more"),
        (build_of(""), "595.1", [90], "built for CPUs: install PyPI's torch"),
        (build_of("12.8"), "520.1", [90], "CUDA 12.8 needs driver 525"),
    ],
)
def test_an_error_says_what_to_install(
    build: object, driver: str, fleet: list[int], words: str
) -> None:
    with pytest.raises(UnfitBuildError, match=words) as caught:
        check_driver(build, driver, fleet)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_what_torch_says_of_itself_is_believed() -> None:
    flags = "sm_75 sm_80 sm_90a compute_120"
    assert capabilities_of(flags) == (75, 80, 90)
    build = build_of("13.0", capabilities_of(flags))
    assert build.capabilities == (75, 80, 90)
    assert not runs(build, "595.1", {120})
    assert build_of("13.0") == PYPI
    assert build_of("12.6") == CU126
    assert runs(build_of("12.9"), "525.1", {70}), "kernels of that build are not known"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_bf16_is_refused_where_it_would_be_emulated(capability: int) -> None:
    check_precision("fp16", capability, "a GPU")
    check_precision("fp32", capability, "a GPU")
    if capability >= 80:
        check_precision("bf16", capability, "a GPU")
    else:
        with pytest.raises(UnfitBuildError, match=r"a GPU .* has no bf16; use fp16"):
            check_precision("bf16", capability, "a GPU")
