"""A job on the user's own hosts: real sshd, real agents, real training to the end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.fakes.sshd import WHY_NOT
from tests.fakes.web import Web, serve_web
from tests.integration.jobs import STEPS, Answer, trains, until
from tests.integration.ssh_hosts import SshJob, kill_vms, ssh_hosts, vm_processes
from tests.view import View

from spottrain.manifest import list_checkpoints
from spottrain.storage.open import open_store
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import State

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

SECRET = "hunter2-hunter2-hunter2"
SETUP = """
[ ${#A_SECRET} = 23 ]
[ -f tiny_job.py ]
[ "$(cat "$SPOTTRAIN_DATA_WORDS")" = hello ]
echo "$GREETING from setup"
"""
WORDS = b"hello"


@dataclass
class Story:
    """What came of the job."""

    job: SshJob
    web: Web
    launched: Answer
    vms: list[set[str]] = field(default_factory=list)
    """After the start, after the kill, after the cut, after the manager's death."""
    generations: list[int] = field(default_factory=list)
    end: State | None = None
    processes_left: list[int] = field(default_factory=list)
    homes: list[list[str]] = field(default_factory=list)

    def note(self, state: State) -> None:
        self.vms.append(set(View(state).vms))
        generation = View(state).current_generation
        self.generations.append(generation.number if generation else 0)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def full_and_training(state: State) -> State | None:
    ready = [vm for vm in View(state).vms.values() if vm.phase is VmPhase.READY]
    return state if len(ready) == 3 and trains(state) else None


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("ssh")
    with (
        serve_web() as web,
        ssh_hosts(folder / "hosts", 3) as hosts,
        SshJob(
            folder,
            "own-hosts",
            hosts,
            entrypoint="tiny_job:reading_job",
            data={"words": {"url": f"{web.url}/words", "sha256": sha256(WORDS)}},
            setup=SETUP,
            secrets=["A_SECRET"],
            env={"GREETING": "hello", "PACE_FILE": str(folder / "own-hosts" / "pace")},
            manager={"suspect_s": 30.0},
        ) as job,
    ):
        job.environment["A_SECRET"] = SECRET
        web.files["/words"] = WORDS
        story = lived_through(job, web)
        job.pace(0.0)
        until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
        story.end = job.state()
        story.processes_left = vm_processes(hosts)
        story.homes = [host.left() for host in hosts]
        yield story


def lived_through(job: SshJob, web: Web) -> Story:
    """Launch the job, and have a host, a connection and the manager die."""
    hosts = job.hosts
    job.pace(0.1)
    story = Story(job, web, job.launch("--detach"))
    assert story.launched.code == 0, story.launched.err
    story.note(job.until("three hosts", full_and_training))

    job.pace(0.3)  # so that the job is not over before all has happened to it
    kill_vms(hosts[:1])
    dead = {vm for vm in story.vms[0] if str(hosts[0].port) in vm}
    back = job.until(
        "the killed host again",
        lambda s: None if dead & set(View(s).vms) else full_and_training(s),
    )
    story.note(back)

    hosts[1].stop()
    hosts[1].start()
    cut = next(vm for vm in story.vms[1] if str(hosts[1].port) in vm)
    after = job.until(
        "reports over a new connection",
        lambda s: s if cut in View(s).vms and View(s).step > View(back).step + 3 else None,
    )
    story.note(after)

    job.kill_manager()
    step = View(job.state()).step
    assert job.resume("--detach").code == 0
    story.note(job.until("more steps", lambda s: s if View(s).step > step + 3 else None))
    return story


def test_it_trains_to_its_end(story: Story) -> None:
    assert story.end is not None
    assert story.end.outcome is not None
    assert story.end.outcome.kind == "succeeded", story.end.outcome
    assert list_checkpoints(open_store(story.job.checkpoint_root))[0].step == STEPS


def test_launch_says_that_the_hosts_answer(story: Story) -> None:
    assert "3 of 3 hosts answer" in story.launched.err


def test_a_host_whose_processes_are_killed_is_taken_again(story: Story) -> None:
    before, after = story.vms[:2]
    assert len(before & after) == 2
    assert len(after) == 3
    assert story.end is not None
    assert View(story.end).tally.preemptions_unnoticed == 1


def test_a_connection_that_breaks_costs_nothing(story: Story) -> None:
    assert story.vms[2] == story.vms[1]
    assert story.generations[2] == story.generations[1]


def test_a_manager_that_is_resumed_finds_its_hosts_again(story: Story) -> None:
    assert story.vms[3] == story.vms[2]
    assert story.generations[3] == story.generations[2]


def test_hosts_are_left_clean(story: Story) -> None:
    assert story.processes_left == []
    assert story.homes == [[".spottrain-data"]] * 3


def test_data_was_fetched_once_a_host_and_once_to_inspect_the_model(
    story: Story,
) -> None:
    assert "data words: 5 B in 1 file" in story.launched.err
    assert len(list(story.job.dir.cloud.glob("vms/*/data.log"))) == 4
    assert len(story.web.gets()) == 3 + 1


def test_setup_ran_once_a_vm_and_its_output_is_kept(story: Story) -> None:
    logs = sorted(story.job.dir.cloud.glob("vms/*/setup.log"))
    assert len(logs) == 4
    assert {log.read_text() for log in logs} == {"hello from setup\n"}
    assert len(list(story.job.dir.cloud.glob("vms/*/agent.log"))) == 4


def test_the_secret_is_written_down_nowhere(story: Story) -> None:
    files = [path for path in story.job.dir.path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_down_frees_hosts_whose_manager_was_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("down")
    with (
        ssh_hosts(folder / "hosts", 1) as hosts,
        SshJob(folder, "to-be-ended", hosts) as job,
    ):
        job.pace(0.3)
        assert job.launch("--detach").code == 0
        job.until("it trains", lambda state: state if trains(state) else None)
        job.kill_manager()
        assert vm_processes(hosts)
        answer = job.run("down", job.name)
        assert answer.code == 0, answer.err
        assert "VMs returned" in answer.err
        assert vm_processes(hosts) == []
        assert hosts[0].left() == []
