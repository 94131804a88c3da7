"""``spottrain prices``."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.fakes.prices import DAY_S, KEY, FakePrices, aws_product, azure_item

from spottrain.pricing.prices.history import VmLife
from spottrain.pricing.prices.place import Place
from spottrain.varuna_manager.jobs.vm_history import open_history
from tests.commands import Run, runs

A100 = "Standard_NC24ads_A100_v4"
ZONE = "us-east-1a"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runs(monkeypatch, capsys, "prices")


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePrices]:
    now_s = datetime.now(UTC).timestamp()
    fake = FakePrices()
    fake.azure = [azure_item(A100, 3.67), azure_item(A100, 1.2, spot=True)]
    fake.aws_products = [aws_product("p4d.24xlarge", "21.957642")]
    fake.aws_spot = [
        (ZONE, "p4d.24xlarge", "8.0", now_s - 5 * DAY_S),
        (ZONE, "p4d.24xlarge", "6.4", now_s - DAY_S),
        ("us-east-1b", "p4d.24xlarge", "21.957642", now_s - DAY_S),
        ("us-east-1c", "p4d.24xlarge", "nan", now_s - DAY_S),
    ]
    with fake.serving():
        for name, value in (
            ("AWS_ENDPOINT_URL", fake.url),
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
            ("AWS_CONFIG_FILE", "/nonexistent"),
            ("SPOTTRAIN_AZURE_PRICES_URL", fake.url),
            ("SPOTTRAIN_GCP_PRICES_URL", fake.url),
            ("GOOGLE_API_KEY", KEY),
        ):
            monkeypatch.setenv(name, value)
        yield fake


def test_prices_of_all_clouds_come_cheapest_gpu_first(run: Run, clouds: FakePrices) -> None:
    code, out, err = run("--gpu", "A100", "--spot", "-o", "json")
    assert code == 0
    document = json.loads(out)
    spot = [
        (offer["cloud"], offer["zone"], offer["usd_per_gpu_hour"])
        for offer in document["offers"]
        if not offer["is_estimate"]
    ]
    assert spot == [("aws", ZONE, 0.8), ("azure", "eastus", 1.2)]
    p4d = document["offers"][0]
    assert [step["usd_per_hour"] for step in p4d["history"]] == [8.0, 6.4]
    assert p4d["peak_flops"]["bf16"] == 312e12
    assert p4d["age_s"] == 0.0
    assert not p4d["stale"]
    assert "us-east-1c p4d.24xlarge spot: price: " in err
    assert any("us-east-1b" in warning for warning in document["warnings"])


def test_without_network_the_last_known_prices_come_with_their_age(
    run: Run, clouds: FakePrices, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--gpu", "A100")
    monkeypatch.setattr("time.time", lambda: datetime.now(UTC).timestamp() + 7200)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("GOOGLE_API_KEY")
    # Another test's project may still run.
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    clouds.faults = [(404, {})]
    code, out, err = run("--gpu", "A100", "--spot")
    assert code == 0
    (line,) = (x for x in err.splitlines() if x.startswith("prices not refreshed"))
    assert "aws configure" in line
    assert "azure: 127.0.0.1" in line
    assert "HTTP 404" in line
    assert "gcp: " in line
    rows = [row for row in out.splitlines() if row.startswith("aws ") and " A100 " in row]
    assert len(rows) == 1
    assert "$6.40" in rows[0]
    assert " 2 h " in rows[0]
    assert "█" in rows[0]


def test_offline_asks_no_cloud(run: Run, clouds: FakePrices) -> None:
    code, out, err = run("--offline", "--gpu", "V100", "--cloud", "aws", "--all")
    assert (code, clouds.asked) == (0, [])
    assert "p3.2xlarge" in out
    assert "stale" in err


def test_what_is_not_known_of_is_said(run: Run) -> None:
    code, out, err = run("--offline", "--type", "a3-ultragpu-8g")
    assert (code, out) == (0, "")
    assert "no known price matches" in err
    code, _, err = run("--gpu", "A1000")
    assert code == 2
    assert err.startswith("error: ")
    assert "A1000" in err


def test_the_cheapest_offer_of_each_gpu_is_shown_and_what_a_dollar_trains(
    run: Run,
) -> None:
    code, out, _ = run("--offline")
    assert code == 0
    gpus = [row.split(" x ")[1].split()[0] for row in out.splitlines()[1:]]
    assert len(gpus) == len(set(gpus)) >= 10
    code, all_out, _ = run("--offline", "--all")
    assert len(all_out.splitlines()) == 31
    profile = Path(__file__).parents[4] / "examples/profiles/varuna-2.5b.json"
    _, out, _ = run("--offline", "--profile", profile, "-o", "json")
    offers = json.loads(out)["offers"]
    worths = [o["examples_per_usd"] for o in offers if o["examples_per_usd"]]
    assert worths == sorted(worths, reverse=True)
    rates = {o["gpu"]: o["examples_per_s_per_gpu"] for o in offers}
    assert rates["H100"] > rates["A100"] > rates["L40S"] > rates["L4"] > rates["T4"]
    assert rates["V100"] == pytest.approx(2.5, rel=0.1)


def test_losses_that_jobs_have_seen_count(run: Run, clouds: FakePrices) -> None:
    now_s = datetime.now(UTC).timestamp()
    place = Place("aws", "us-east-1", ZONE, "p4d.24xlarge")
    with open_history() as history:
        history.record_vms(
            VmLife(
                job="j",
                vm_id=f"vm-{n}",
                place=place,
                spot=True,
                from_s=now_s - 36000.0,
                until_s=now_s,
                ended="kill",
            )
            for n in range(10)
        )
    _, out, _ = run("--type", "p4d.24xlarge", "--spot", "-o", "json")
    (offer,) = json.loads(out)["offers"]
    hazard = offer["hazard"]
    assert (hazard["losses"], hazard["vm_hours"]) == (10, pytest.approx(100))
    before = 24 * hazard["prior_per_hour"]
    assert hazard["losses_per_hour"] == pytest.approx((10 + before) / 124)
    assert hazard["low"] < hazard["losses_per_hour"] < hazard["high"]


def test_history_can_be_drawn_and_exported(run: Run, clouds: FakePrices, tmp_path: Path) -> None:
    code, _, _ = run(*("--gpu", "A100", "--svg", tmp_path / "p.svg", "--export", tmp_path / "all"))
    assert code == 0
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    assert any("p4d.24xlarge" in (e.text or "") for e in root.iter())
    with (tmp_path / "all" / "prices.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["zone"] == ZONE]
    assert [float(row["usd_per_hour"]) for row in rows] == [8.0, 6.4]
    header = (tmp_path / "all" / "vms.csv").read_text()
    assert header.startswith("job,vm_id,cloud,region,zone")
    code, _, err = run("--offline", "--svg", "/proc/none/p.svg")
    assert code == 2
    assert "cannot be written" in err
