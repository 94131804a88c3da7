"""The providers under contract, and the few exemptions; any other skip is a failure."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import pytest
from tests.contract.account import Account, on_fake
from tests.contract.gcp_account import gcp_over_ssh
from tests.contract.kubernetes_account import kubernetes
from tests.contract.local_account import local
from tests.contract.multi_account import multi
from tests.contract.real_account import (
    RealCloud,
    add_options,
    check_options,
    real_cloud,
    wanted,
)
from tests.contract.rented_account import aws_over_ssh
from tests.contract.slurm_account import slurm, slurm_over_ssh
from tests.contract.ssh_account import ssh
from tests.fakes.slurm import WHY_NO_ACCOUNTS, WHY_NO_SLURM, Slurm, a_slurm
from tests.fakes.sshd import WHY_NOT
from tests.tiers import PARTS

PROVIDERS: dict[str, Callable[[pytest.FixtureRequest], Iterator[Account]]] = {
    "aws": on_fake("fake_aws"),
    "aws over ssh": aws_over_ssh,
    "azure": on_fake("fake_azure"),
    "gcp": on_fake("fake_gcp"),
    "gcp over ssh": gcp_over_ssh,
    "kubernetes": kubernetes,
    "local": local,
    "multi": multi,
    "slurm": slurm,
    "slurm over ssh": slurm_over_ssh,
    "ssh": ssh,
}
"""A new provider adds itself here: how to set up and take down an account."""
ALWAYS = "ssh"
"""Real SSH servers: nothing of it is a fake."""

_OWN_CRASHES = "a process of this machine: tests/unit/cloud/local kills it instead"
_OVER_SSH = "agents are brought to it over SSH by whoever wraps it: cloud.ssh"
_QUEUE = "what finds no free node waits: test_slurm.py"
_WAITS = "what finds no node waits, and quotas are refusals: test_kubernetes.py"
_STOCK = "how many machines a real cloud has is not ours to say"
_LINE = "the line to a real cloud cannot be cut: the fakes' is"
ON_A_REAL_ACCOUNT: dict[str, str] = {
    "test_an_agent_cannot_be_started_on_an_ended_vm": _OVER_SSH,
    "test_starting_an_agent_is_idempotent": _OVER_SSH,
    "test_a_launch_of_more_than_there_are_gives_what_there_is": _STOCK,
    "test_a_launch_without_machines_is_no_capacity": _STOCK,
    "test_a_crash_at_any_request_rents_nothing_twice": _LINE,
}
REAL = "a real account"
EXEMPT: dict[tuple[str, str], str] = {
    **{(test, REAL): why for test, why in ON_A_REAL_ACCOUNT.items()},
    ("test_an_agent_cannot_be_started_on_an_ended_vm", "aws"): _OVER_SSH,
    ("test_an_agent_cannot_be_started_on_an_ended_vm", "azure"): _OVER_SSH,
    ("test_an_agent_cannot_be_started_on_an_ended_vm", "gcp"): _OVER_SSH,
    ("test_an_agent_cannot_be_started_on_an_ended_vm", "multi"): _OVER_SSH,
    ("test_starting_an_agent_is_idempotent", "multi"): _OVER_SSH,
    ("test_starting_an_agent_is_idempotent", "aws"): _OVER_SSH,
    ("test_starting_an_agent_is_idempotent", "azure"): _OVER_SSH,
    ("test_starting_an_agent_is_idempotent", "gcp"): _OVER_SSH,
    ("test_a_crash_at_any_request_rents_nothing_twice", "local"): _OWN_CRASHES,
    ("test_a_release_leaves_nothing_of_the_job", "local"): "VMs share nothing",
    ("test_a_release_leaves_nothing_of_the_job", "ssh"): "VMs share nothing",
    ("test_a_crash_at_any_request_rents_nothing_twice", "ssh"): (
        "claims lie on the hosts: tests/integration/test_ssh_provider.py"
    ),
    ("test_a_launch_without_machines_is_no_capacity", "kubernetes"): _WAITS,
    **{
        (test, provider): why
        for provider in ("slurm", "slurm over ssh")
        for test, why in {
            "test_a_launch_of_more_than_there_are_gives_what_there_is": _QUEUE,
            "test_a_launch_without_machines_is_no_capacity": _QUEUE,
            "test_a_crash_at_any_request_rents_nothing_twice": (
                "its line is Slurm's own commands: test_slurm.py cuts them"
            ),
        }.items()
    },
}
"""(test, provider) -> why it need not hold there."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with a_slurm(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture(scope="session")
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealCloud]:
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.write_line(f"\n{wanted(request.config)}: {text}")

    with real_cloud(request.config, tmp_path_factory.mktemp("keys"), say) as cloud:
        yield cloud


def real_account(request: pytest.FixtureRequest) -> Iterator[Account]:
    cloud: RealCloud = request.getfixturevalue("real")
    yield from cloud.account()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    check_options(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "account" in metafunc.fixturenames:
        name = metafunc.function.__name__
        providers = [
            pytest.param(provider, id=provider, marks=_turn(provider))
            for provider in sorted(PROVIDERS)
            if (name, provider) not in EXEMPT
        ]
        if wanted(metafunc.config):
            providers = [pytest.param(REAL, marks=pytest.mark.cloud)]
        metafunc.parametrize("account", providers, indirect=True)


def _turn(provider: str) -> tuple[pytest.MarkDecorator, ...]:
    """Let the gate run one provider each time, and of the others two or three in turn."""
    if provider == ALWAYS:
        return ()
    first = sorted(PROVIDERS).index(provider)
    parts = [(first + step) % PARTS for step in (0, 3, 7)]
    return (pytest.mark.rotated(parts=parts),)


@pytest.fixture
def account(request: pytest.FixtureRequest) -> Iterator[Account]:
    if reason := EXEMPT.get((request.node.originalname, request.param)):
        pytest.skip(reason)
    make = real_account if request.param == REAL else PROVIDERS[request.param]
    yield from make(request)


def unexcused(test: str, provider: str, reason: str) -> bool:
    """Return whether a skip counts as a failure.

    Args:
        test: Its name, without what it is run over.
        provider: What it is run over, empty for nothing.
        reason: Why it was skipped.
    """
    if any(why and why in reason for why in (WHY_NOT, WHY_NO_SLURM, WHY_NO_ACCOUNTS)):
        return False  # there is no OpenSSH server, or no Slurm, on this machine
    return (test, provider) not in EXEMPT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped:
        name = getattr(item, "originalname", item.name)
        callspec = getattr(item, "callspec", None)
        provider = "" if callspec is None else callspec.params.get("account", "")
        if unexcused(name, provider, str(report.longrepr)):
            report.outcome = "failed"
            report.longrepr = f"skipped without a reason in EXEMPT: {report.longrepr}"
    return report
