"""The providers under contract, and the few exemptions; any other skip is a failure."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import pytest
from tests.contract.account import Account
from tests.contract.aws_account import aws
from tests.contract.azure_account import azure
from tests.contract.gcp_account import gcp, gcp_over_ssh
from tests.contract.local_account import local
from tests.contract.rented_account import aws_over_ssh
from tests.contract.ssh_account import ssh
from tests.fakes.aws import FakeAws, running
from tests.fakes.azure import FakeAzure
from tests.fakes.azure import running as running_azure
from tests.fakes.gcp import FakeGcp
from tests.fakes.gcp import running as running_gcp
from tests.fakes.sshd import WHY_NOT

PROVIDERS: dict[str, Callable[[pytest.FixtureRequest], Iterator[Account]]] = {
    "aws": aws,
    "aws over ssh": aws_over_ssh,
    "azure": azure,
    "gcp": gcp,
    "gcp over ssh": gcp_over_ssh,
    "local": local,
    "ssh": ssh,
}
"""A new provider adds itself here: how to set up and take down an account."""

_OWN_CRASHES = "a process of this machine: tests/unit/cloud/local kills it instead"
_OVER_SSH = "agents are brought to it over SSH by whoever wraps it: cloud.ssh"
EXEMPT: dict[tuple[str, str], str] = {
    ("test_an_agent_cannot_be_started_on_a_vm_that_is_gone", "aws"): _OVER_SSH,
    ("test_an_agent_cannot_be_started_on_a_vm_that_is_gone", "azure"): _OVER_SSH,
    ("test_an_agent_cannot_be_started_on_a_vm_that_is_gone", "gcp"): _OVER_SSH,
    ("test_an_agent_may_be_started_again_and_again", "aws"): _OVER_SSH,
    ("test_an_agent_may_be_started_again_and_again", "azure"): _OVER_SSH,
    ("test_an_agent_may_be_started_again_and_again", "gcp"): _OVER_SSH,
    ("test_a_crash_at_any_request_rents_nothing_twice", "local"): _OWN_CRASHES,
    ("test_a_release_leaves_nothing_of_the_job", "local"): "VMs share nothing",
    ("test_a_release_leaves_nothing_of_the_job", "ssh"): "VMs share nothing",
    ("test_a_crash_at_any_request_rents_nothing_twice", "ssh"): (
        "claims lie on the hosts: tests/integration/test_ssh_provider.py"
    ),
}
"""(test, provider) -> why it need not hold there."""


@pytest.fixture(scope="session")
def fake_aws() -> Iterator[FakeAws]:
    with running() as fake:
        yield fake


@pytest.fixture(scope="session")
def fake_azure() -> Iterator[FakeAzure]:
    with running_azure() as fake:
        yield fake


@pytest.fixture(scope="session")
def fake_gcp() -> Iterator[FakeGcp]:
    with running_gcp() as fake:
        yield fake


@pytest.fixture(params=sorted(PROVIDERS))
def account(request: pytest.FixtureRequest) -> Iterator[Account]:
    if reason := EXEMPT.get((request.node.originalname, request.param)):
        pytest.skip(reason)
    yield from PROVIDERS[request.param](request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    callspec = getattr(item, "callspec", None)
    if report.skipped and callspec is not None:
        name = getattr(item, "originalname", item.name)
        server_missing = bool(WHY_NOT) and WHY_NOT in str(report.longrepr)
        exempt = (name, callspec.params.get("account")) in EXEMPT or server_missing
        if not exempt:
            report.outcome = "failed"
            report.longrepr = f"skipped without a reason in EXEMPT: {report.longrepr}"
    return report
