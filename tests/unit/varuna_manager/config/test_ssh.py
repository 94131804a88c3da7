"""The job file's part about the user's own hosts."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Any

import pytest

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.job import load_config, parse_config
from spottrain.varuna_manager.config.ssh import SshConfig, check_secrets, environment_of

JOB: dict[str, Any] = {
    "name": "job",
    "entrypoint": "train:job",
    "minibatch_size": 8,
    "steps": 1,
    "resources": {"provider": "ssh"},
    "checkpoint": {"path": "/shared"},
}


def with_hosts(*hosts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**JOB, "ssh": {"hosts": list(hosts)}, **changes}


def test_a_host_needs_an_address_and_nothing_else() -> None:
    (host,) = parse_config(with_hosts({"address": "10.0.0.7"}), "x").ssh.fleet()
    assert (host.name, host.port, host.python) == ("10.0.0.7", 22, "python3")
    assert host.user == getpass.getuser()
    assert host.known_hosts == Path("~/.ssh/known_hosts").expanduser()
    assert (host.slots, host.usd_per_hour) == (1, 0.0)


def test_a_host_says_what_the_others_do_not() -> None:
    config = SshConfig.model_validate(
        {
            "user": "all",
            "python": "/all/python",
            "hosts": (
                {"address": "a", "user": "one", "python": "/one/python"},
                {"address": "a", "port": 2222},
                {"address": "fe80::1"},
            ),
        }
    )
    one, other, third = config.fleet()
    assert (one.name, one.user, one.python) == ("a", "one", "/one/python")
    assert (other.name, other.user, other.python) == ("a-2222", "all", "/all/python")
    assert third.name == "fe80-1"


def test_paths_are_relative_to_the_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "{name: job, entrypoint: 'train:job', minibatch_size: 8, steps: 1, resources: "
        "{provider: ssh}, checkpoint: {path: saved}, ssh: {key_file: key, known_hosts: "
        "keys/hosts, hosts: [{address: a}]}}"
    )
    (host,) = load_config(file).ssh.fleet()
    assert host.key_file == tmp_path / "key"
    assert host.known_hosts == tmp_path / "keys" / "hosts"


def test_a_host_by_name_is_what_the_ssh_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".ssh"
    folder.mkdir()
    (folder / "id_lab").touch()
    (folder / "config").write_text(
        "Host gpu3\n  ProxyJump none\n"
        "Host odd\n  ProxyCommand nc %h %p\n"
        "Host gpu*\n  HostName %h.lab\n  User ubuntu\n  Port 2222\n  ProxyJump me@front:2200\n"
        "  IdentityFile ~/.ssh/none\n  IdentityFile ~/.ssh/id_lab\n"
    )
    config = parse_config({**JOB, "ssh": {"hosts": ["gpu1", "gpu3", "10.0.0.7"]}}, "x")
    one, three, other = config.ssh.fleet()
    assert (one.name, one.address, one.port, one.user) == ("gpu1", "gpu1.lab", 2222, "ubuntu")
    assert (one.key_file, one.proxy_jump) == (folder / "id_lab", "me@front:2200")
    assert three.proxy_jump == ""
    assert (other.name, other.address, other.port) == ("10.0.0.7", "10.0.0.7", 22)
    assert other.user == getpass.getuser()
    (folder / "config").unlink()
    assert parse_config(config.model_dump(mode="json"), "x") == config, "it is settled"
    (bare,) = parse_config({**JOB, "ssh": {"hosts": ["gpu1"]}}, "x").ssh.fleet()
    assert (bare.address, bare.port) == ("gpu1", 22)
    (folder / "config").write_text("Host odd\n  ProxyCommand nc %h %p\n")
    with pytest.raises(ConfigError, match=r"odd has a ProxyCommand in .*; use ProxyJump there"):
        parse_config({**JOB, "ssh": {"hosts": ["odd"]}}, "x")


def test_numbers_and_truths_of_env_become_text() -> None:
    env = {"LR": 1e-3, "TINY": 1e-9, "N": 10_000, "FLAG": True, "OFF": False, "TEXT": "1e-3"}
    assert parse_config(with_hosts({"address": "a"}, env=env), "x").env == {
        "LR": "0.001",
        "TINY": "1e-09",
        "N": "10000",
        "FLAG": "true",
        "OFF": "false",
        "TEXT": "1e-3",
    }


MISTAKES = [
    (with_hosts(), "resources.provider ssh needs hosts; list them in ssh.hosts"),
    (with_hosts({"address": "a"}, checkpoint={}), "needs a checkpoint.path that all"),
    (with_hosts({"address": "a"}, {"address": "a"}), "two hosts are named a"),
    (
        with_hosts({"address": "a"}, {"address": "b", "slots": 2}),
        "hosts of type host must have the same slots: got 1 and 2",
    ),
    (
        with_hosts({"address": "a"}, morphing={"objective": "examples_per_dollar"}),
        "give every host its usd_per_hour",
    ),
    (with_hosts({"adress": "a"}), "ssh.hosts[0].adress: unknown key"),
    (with_hosts({"address": "a", "port": 0}), "ssh.hosts[0].port"),
    (
        with_hosts({"address": "a", "proxy_jump": "a,-oProxyCommand=x"}),
        "ssh.hosts[0].proxy_jump: must be [user@]host[:port]",
    ),
    (with_hosts({"address": "a"}, env={"A": None}), "env.A: must be"),
    (with_hosts({"address": "a", "name": "../b"}), "ssh.hosts[0].name"),
    ({**JOB, "ssh": {"folder": ".", "hosts": [{"address": "a"}]}}, "ssh.folder"),
    ({**JOB, "ssh": {"folder": "a/../..", "hosts": [{"address": "a"}]}}, "ssh.folder"),
    (with_hosts({"address": "a"}, env={"SPOTTRAIN_VM": "x"}), "spottrain does not set"),
    (with_hosts({"address": "a"}, env={"A B": "x"}), "must be the name of a variable"),
    (with_hosts({"address": "a"}, secrets=["A=B"]), "must be the name of a variable"),
    (
        {**JOB, "resources": {}, "setup": "pip install x"},
        "setup cannot be used with the local provider",
    ),
]


@pytest.mark.parametrize(("data", "message"), MISTAKES)
def test_a_mistake_is_reported_in_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(data, "job.yaml")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_plan_is_made_for_the_hosts_of_each_type() -> None:
    a, b = parse_config(
        with_hosts(
            {"address": "1", "type": "a", "slots": 4},
            {"address": "2", "type": "b", "usd_per_hour": 2.5},
            {"address": "3", "type": "a", "slots": 4},
        ),
        "x",
    ).zones
    assert (a.instance_type, a.capacity, a.slots) == ("a", 2, 4)
    assert (b.instance_type, b.capacity, b.spot_usd_per_hour) == ("b", 1, 2.5)


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "s")
    monkeypatch.delenv("ANOTHER", raising=False)
    names = ("A_SECRET", "ANOTHER")
    assert environment_of({"PLAIN": "p"}, names) == {"PLAIN": "p", "A_SECRET": "s"}
    check_secrets(names[:1])
    with pytest.raises(
        ConfigError, match=r"^secrets: ANOTHER is not set in the environment; set it"
    ):
        check_secrets(names)


def test_gpus_of_a_host_are_of_the_catalogue_and_those_of_its_type() -> None:
    config = parse_config(with_hosts({"address": "a", "gpu": "A100-80GB"}), "x").ssh
    assert [host.gpu for host in config.fleet()] == ["A100-80GB"]
    assert [host.uses_gpus for host in config.fleet(uses_gpus=False)] == [False]
    with pytest.raises(ConfigError, match=r"gpu: must be one of .*T4"):
        parse_config(with_hosts({"address": "a", "gpu": "Voodoo 2"}), "x")
    with pytest.raises(ConfigError, match=r"gpu: did you mean A100-80GB\?"):
        parse_config(with_hosts({"address": "a", "gpu": "a100-80g"}), "x")
    with pytest.raises(ConfigError, match="must have the same gpu: got T4 and None"):
        parse_config(with_hosts({"address": "a", "gpu": "T4"}, {"address": "b"}), "x")
