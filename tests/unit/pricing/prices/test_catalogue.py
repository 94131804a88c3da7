"""The catalogue that ships: its facts fit together and are what cards can be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from spottrain.errors import ConfigError
from spottrain.pricing.prices.catalogue import (
    CLOUDS,
    DATA,
    PRECISIONS,
    InstanceType,
    catalogue,
)
from spottrain.pricing.prices.hazard import BANDS

FACTS = catalogue()


NVLINKS = {25e9, 300e9, 450e9, 900e9}
"""Each way: one of a V100's six, all of an A100's, an H100's, a B200's."""
WITH_GPUS = FACTS.matching()
WITHOUT = [kind for kind in FACTS.types.values() if kind.device == "cpu"]


@pytest.mark.parametrize("kind", WITH_GPUS, ids=lambda kind: kind.name)
def test_a_machine_has_as_many_gpus_as_machines_have(kind: InstanceType) -> None:
    assert kind.cloud in CLOUDS
    assert kind.gpus in (1, 2, 4, 8, 16)
    assert kind.vcpus >= kind.gpus
    assert kind.memory_bytes >= kind.gpus * 2**32
    network = kind.network_bytes_per_s
    assert network is None or 5e9 / 8 <= network <= 6400e9 / 8
    lasting = kind.sustained_bytes_per_s
    assert lasting is None or (network is not None and 2e9 / 8 <= lasting <= network)


@pytest.mark.parametrize("kind", WITHOUT, ids=lambda kind: kind.name)
def test_a_machine_without_gpus_has_a_worker_for_each_core(kind: InstanceType) -> None:
    assert kind.gpus == kind.vcpus // 2 >= 1
    assert kind.gpu.memory_bytes * kind.gpus <= kind.memory_bytes
    assert kind.gpu.memory_bytes >= 2 * 2**30
    assert 50e9 <= kind.gpu.peak_flops["fp32"] <= 500e9


def test_machines_without_gpus_are_found_by_their_names_alone() -> None:
    assert {kind.cloud for kind in WITHOUT} == set(CLOUDS)
    assert all(kind.device == "gpu" for kind in FACTS.matching(clouds=["aws"]))
    (kind,) = FACTS.matching(names=["c7i.4xlarge"])
    assert (kind.gpu.name, kind.gpus) == ("Xeon Platinum 8488C", 8)
    core = FACTS.gpu_of("Intel(R) Xeon(R) Platinum 8488C, 1 thread")
    assert core is not None
    assert core.name == kind.gpu.name


def test_compute_capabilities_are_those_of_the_architectures() -> None:
    known = {name: gpu.compute_capability for name, gpu in FACTS.gpus.items()}
    assert all(50 <= capability <= 130 for capability in known.values())
    assert (known["V100"], known["T4"], known["A10G"], known["L4"]) == (70, 75, 86, 89)
    assert (known["A100"], known["H100"], known["B200"]) == (80, 90, 100)


def test_more_precision_is_never_faster() -> None:
    for gpu in FACTS.gpus.values():
        peaks = [gpu.peak_flops[name] for name in PRECISIONS if name in gpu.peak_flops]
        assert peaks == sorted(peaks), gpu.name
        assert all(1e12 <= peak <= 1e16 for peak in peaks), gpu.name
        assert 8e9 <= gpu.memory_bytes <= 300e9, gpu.name
        assert 2e11 <= gpu.memory_bytes_per_s <= 1e13, gpu.name
        assert 0.3 <= gpu.matmul_share <= 1.0, gpu.name
        assert gpu.share_source is not None, gpu.name


def test_memory_is_what_drivers_report() -> None:
    mib = {name: gpu.memory_bytes // 2**20 for name, gpu in FACTS.gpus.items()}
    assert (mib["T4"], mib["H100"], mib["H200"]) == (15_360, 81_559, 143_771)


def test_every_gpu_is_in_some_machine_and_every_source_backs_something() -> None:
    unrented = {"H100-PCIE"}  # on people's own hosts
    assert {kind.gpu.name for kind in WITH_GPUS} == {*FACTS.gpus} - unrented
    assert {kind.gpu.name for kind in WITHOUT} == set(FACTS.cpus)
    text = "".join(path.read_text() for path in DATA.glob("*.csv") if path.stem != "sources")
    assert all(text.count(name) for name in FACTS.sources)


def test_published_prices_are_of_known_machines_and_plausible() -> None:
    prices = list(FACTS.published())
    places = Counter((p.cloud, p.region, p.instance_type, p.spot) for p in prices)
    assert max(places.values()) == 1
    for price in prices:
        kind = FACTS.find(price.cloud, price.instance_type)
        assert kind is not None
        least = 0.1 if price.spot else 0.2
        assert least <= price.usd_per_hour / kind.gpus <= 30, price
    on_demand = {(p.cloud, p.region, p.instance_type): p for p in prices if not p.spot}
    assert {p.cloud for p in prices if p.spot} == set(CLOUDS)
    assert {p.cloud for p in prices if not p.spot} == set(CLOUDS)
    for price in prices:
        place = price.cloud, price.region, price.instance_type
        if price.spot and place in on_demand:
            assert price.usd_per_hour < 0.8 * on_demand[place].usd_per_hour, price


def test_published_bands_are_of_known_machines() -> None:
    for (cloud, _, name), band in FACTS.bands().items():
        assert FACTS.find(cloud, name) is not None
        assert 0 <= band < len(BANDS)


def test_every_gpu_has_a_link_of_the_kind_that_its_form_factor_has() -> None:
    links = {name: gpu.link for name, gpu in FACTS.gpus.items()}
    for name, link in links.items():
        assert link is not None, name
        assert 0.5 <= link.share <= 1.0
        assert link.bytes_per_s in ({16e9, 32e9, 64e9} if link.name == "PCIe" else NVLINKS), name
    found = {
        (cloud, name): kind.gpu.link and kind.gpu.link.name
        for (cloud, name), kind in FACTS.types.items()
    }
    assert found["aws", "p4d.24xlarge"] == found["gcp", "a3-highgpu-8g"] == "NVLink"
    assert found["azure", "Standard_ND96isr_H100_v5"] == found["aws", "p3.16xlarge"] == "NVLink"
    assert found["azure", "Standard_NC96ads_A100_v4"] == found["aws", "g6e.48xlarge"] == "PCIe"
    assert found["aws", "c7i.4xlarge"] is None


def test_facts_agree_with_what_is_well_known() -> None:
    kind = FACTS.types["aws", "p4d.24xlarge"]
    assert (kind.gpu.name, kind.gpus, kind.vcpus) == ("A100", 8, 96)
    assert kind.gpu.memory_bytes == 40 * 2**30
    assert kind.gpu.peak_flops["bf16"] == 312e12
    assert kind.network_bytes_per_s == 50e9


def test_a_gpu_is_found_with_or_without_its_memory() -> None:
    every = FACTS.matching(gpus=["a100"])
    assert {kind.gpu.name for kind in every} == {"A100", "A100-80GB", "A100-80GB-PCIE"}
    assert {kind.gpu.name for kind in FACTS.matching(gpus=["A10"])} == {"A10"}
    large = FACTS.matching(gpus=["A100-80GB"], clouds=["aws"])
    assert [kind.name for kind in large] == ["p4de.24xlarge"]
    assert len(WITH_GPUS) == len(FACTS.types) - len(WITHOUT)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"gpus": ["A1000"]}, "no such GPU: got A1000; did you mean A10"),
        ({"clouds": ["oci"]}, "no such cloud: got oci; take one of aws"),
        ({"names": ["p4d"]}, "no such instance type in the catalogue: got p4d"),
    ],
)
def test_unknown_names_are_refused(filters: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FACTS.matching(**filters)


def test_the_data_travels_with_the_package() -> None:
    project = Path(__file__).parents[4] / "pyproject.toml"
    package = catalogue.__module__.rpartition(".")[0]
    assert f'"{package}" = ["data/*.csv"]' in project.read_text()


def test_disks_and_addresses_are_priced_from_the_dated_table() -> None:
    facts = catalogue()
    for cloud, disk_usd in (("aws", 16.0), ("azure", 19.2), ("gcp", 20.0)):
        bare = facts.attached_usd_per_hour(cloud, 200, public_address=False)
        assert bare == pytest.approx(disk_usd / 730, rel=1e-3)
        whole = facts.attached_usd_per_hour(cloud, 200, public_address=True)
        assert whole - bare == pytest.approx(0.005)
    assert facts.attached_usd_per_hour("local", 200, public_address=True) == 0.0
    for row in facts._rows("attached"):
        assert {row["disk_source"], row["address_source"]} <= facts.sources.keys()
