"""The run of the contract on a real account, tried on AWS's fake, and its cap."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_launch, a_vm, an_offer
from tests.contract import test_provider
from tests.contract.account import Account
from tests.contract.conftest import EXEMPT, PROVIDERS, REAL, unexcused
from tests.contract.real_account import VMS, RealCloud, check_options
from tests.contract.spending_cap import MAX_VM_S, MAX_VMS, CapError, Capped, SpendingCap
from tests.fakes.aws import KIND, REGION, ZONE, FakeAws

ROOT = Path(__file__).resolve().parents[2]
OFFER = an_offer(
    cloud="aws",
    region=REGION,
    zone=ZONE,
    instance_type=KIND,
    usd_per_hour=1.2,
    gpu_memory_bytes=1,
)
VM = a_vm("", OFFER, private_address="")


@pytest.fixture
def fake(fake_aws: FakeAws) -> Iterator[FakeAws]:
    """AWS's fake with machines enough."""
    fake_aws.reset()
    fake_aws.ask("stock", zone=ZONE, instance_type=KIND, count=20)
    yield fake_aws
    assert fake_aws.ask("left") == []
    assert fake_aws.ask("drifts") == []


def pytest_run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own."""
    inherited = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    inherited.pop("CI", None)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=inherited | environment,
        timeout=1500,
    )


def run(fake: FakeAws, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run what ``scripts/test --cloud aws`` runs, with the fake for AWS."""
    file = folder / "aws.yaml"
    file.write_text(f"instance_types: [{KIND}]\nregions: [{REGION}]\n")
    suite = "tests/contract/test_provider.py"
    settings = ("--cloud", "aws", "--cloud-settings", str(file))
    where = {"AWS_ENDPOINT_URL": fake.url, "SPOTTRAIN_HOME": str(folder)}
    return pytest_run(suite, *settings, *options, **where)


@pytest.mark.rotated
def test_the_suite_runs_on_an_account_and_leaves_it_empty(fake: FakeAws, tmp_path: Path) -> None:
    done = run(fake, tmp_path, "--max-usd", "2")
    assert done.returncode == 0, done.stdout
    assert "never above 2 USD" in done.stdout
    (told, cost) = re.findall(r"about (\d\.\d\d) USD", done.stdout)
    assert 0.0 < float(cost) < float(told)
    assert len(fake.ask("bill")) == VMS


@pytest.mark.rotated
def test_no_launch_exceeds_the_cap(fake: FakeAws, tmp_path: Path) -> None:
    done = run(fake, tmp_path, "--max-usd", "0.3", "-k", "same_token")
    assert done.returncode == 1
    assert "above the cap of 0.3 USD" in done.stdout
    assert fake.ask("bill") == []


@pytest.mark.rotated
def test_leftovers_of_a_test_are_removed(fake: FakeAws) -> None:
    cloud = RealCloud([fake.provider()], SpendingCap(2.0))
    account = next(cloud.account())  # and it dies
    provider = account.connect()
    provider.launch(account.launch_request(provider.offers()[0], 2))
    other = fake.provider()
    (theirs,) = other.launch(replace(account.launch_request(OFFER), job="another")).vms
    assert len(cloud.sweep()) == 2
    assert cloud.sweep() == []
    other.terminate([theirs.vm_id])
    other.release("another")


@pytest.mark.parametrize(
    ("options", "ci", "said"),
    [
        ({}, "", "--max-usd 2"),
        ({"max_usd": 0.0}, "", "--max-usd 2"),
        ({"max_usd": 2.0}, "true", "not in CI"),
    ],
)
def test_it_refuses_to_start_without_a_cap_or_in_ci(
    options: dict[str, Any], ci: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    told = {"cloud": "aws", **options}
    config = SimpleNamespace(getoption=lambda name, default=None: told.get(name))
    with pytest.raises(pytest.UsageError, match=said):
        check_options(cast(pytest.Config, config))


# --- the spending cap -----------------------------------------------------------------

STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.floats(0, MAX_VM_S)))


@given(STEPS, st.floats(0.1, 3.0))
def test_no_run_can_cost_more_than_its_cap(
    steps: list[tuple[int, int, float]], cap_usd: float
) -> None:
    now_s = 0.0
    spending_cap = SpendingCap(cap_usd, lambda: now_s)
    alive: dict[str, float] = {}
    paid_s = 0.0
    for number, (what, count, pause_s) in enumerate(steps):
        if what:
            launch_request = a_launch(OFFER, count, token=str(number), lease_s=60.0)
            try:
                spending_cap.hold(launch_request)
            except CapError:
                continue
            got = [replace(VM, vm_id=f"{number}-{each}") for each in range(count)]
            spending_cap.rented(launch_request.token, got)
            alive |= {vm.vm_id: now_s for vm in got}
        else:
            for vm_id in list(alive)[:count]:
                spending_cap.returned([vm_id, "unknown"])
                paid_s += max(60.0, min(now_s - alive.pop(vm_id), MAX_VM_S))
        worst_s = paid_s + sum(MAX_VM_S for _ in alive)
        assert worst_s * OFFER.usd_per_hour / 3600 <= spending_cap.max_usd + 1e-9
        assert spending_cap.max_usd <= cap_usd + 1e-9 or now_s > 0
        assert len(alive) <= MAX_VMS
        now_s += min(pause_s, MAX_VM_S / (len(steps) + 1))


def test_a_refused_launch_is_not_counted(fake: FakeAws) -> None:
    fake.ask("stock", zone=ZONE, instance_type=KIND, count=0)
    spending_cap = SpendingCap(2.0)
    provider = Capped(fake.provider(), spending_cap)
    account = Account(lambda: provider, "job", 0)
    with pytest.raises(Exception, match="InsufficientInstanceCapacity"):
        provider.launch(account.launch_request(provider.offers()[0]))
    assert spending_cap.max_usd == 0.0
    provider.release("job")


# --- the list of exemptions -----------------------------------------------------------


def test_every_exemption_is_of_a_test_and_a_provider_that_exist() -> None:
    tests = dict(inspect.getmembers(test_provider, inspect.isfunction))
    for test, provider in EXEMPT:
        assert test in tests, test
        assert provider in {*PROVIDERS, REAL}, provider
    assert all(EXEMPT.values())


def test_a_skip_that_is_not_on_the_list_counts_as_a_failure() -> None:
    (test, provider), reason = next(iter(EXEMPT.items()))
    assert not unexcused(test, provider, reason)
    assert unexcused(test, "no provider", reason)
    assert unexcused("another_test", provider, reason)
    assert unexcused("another_test", "", "")


@pytest.mark.rotated
def test_such_a_skip_fails_the_run(tmp_path: Path) -> None:
    """By the very hook of the suite, in a run of its own."""
    file = tmp_path / "test_skips.py"
    file.write_text(
        "import pytest\n\n\n"
        "def test_it():\n    pytest.skip('it is late')\n\n\n"
        "@pytest.mark.skip(reason='so there')\n"
        "def test_other():\n    pass\n"
    )
    rooted = (f"--rootdir={tmp_path}", "-c", os.devnull)
    done = pytest_run(str(file), "-p", "tests.contract.conftest", *rooted)
    assert "1 failed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "skipped without a reason in EXEMPT" in done.stdout
