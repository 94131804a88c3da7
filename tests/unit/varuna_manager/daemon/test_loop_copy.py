"""The manager's loop with a copied journal: what waits for the store, and what ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from tests.builders import a_vm
from tests.unit.varuna_manager.measured_jobs import trained
from tests.unit.varuna_manager.stored_jobs import (
    copied,
    events,
    stored,
    submit,
    take_over,
)
from tests.unit.varuna_manager.story import OFFER

from spottrain.cloud.port.provider import CloudProvider, LaunchRequest, LaunchResult, Offer, Vm
from spottrain.varuna_manager.core.model.events import (
    LaunchRefused,
    TimerFired,
    VmsListed,
)
from spottrain.varuna_manager.daemon.loop import ManagerLoop
from spottrain.varuna_manager.jobs.bucket import FencedError
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.identity import ensure_identity
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.varuna_manager.jobs.replication import begin_replication
from spottrain.wire.messages import LogTail, LogTails

LONG_S = 600.0


class Cloud(CloudProvider):
    """One that is asked for VMs and has none; it remembers what the store had then."""

    name = "local"

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self.asked = threading.Event()
        self.journalled = 0
        self.copied = 0

    def offers(self) -> Sequence[Offer]:
        return [OFFER]

    def launch(self, request: LaunchRequest) -> LaunchResult:
        with closing(Journal(self._job.journal, read_only=True)) as journal:
            asked = journal.search(f'"LaunchVms","{request.intent}"')
            self.journalled = next(row.seq for row in asked)
        self.copied = copied(self._job)
        self.asked.set()
        return LaunchResult(vms=())

    def list_vms(self, job: str) -> Sequence[Vm]:
        return []

    def terminate(self, vm_ids: Collection[str]) -> None:
        raise AssertionError(f"nothing is rented: got {vm_ids}")


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return submit(tmp_path, f"file://{tmp_path}/store")


async def run(
    job: JobDir,
    cloud: Cloud,
    *,
    replaced: bool = False,
    story: Callable[[ManagerLoop], Awaitable[None]] | None = None,
) -> None:
    """Manage until the cloud has been asked for VMs, or the loop gives up.

    Args:
        job: A job that was just submitted.
        cloud: What it rents from.
        replaced: Another machine takes it over at once.
        story: What happens in the end.
    """
    copy = begin_replication(job, durable=True)
    assert copy is not None
    if replaced:
        stored(job).claim("another folder", take_over=True)
    journal = Journal(job.journal)
    identity = ensure_identity(job.path, ("localhost",))
    measured = Measurements(job.measurements)
    shell = ManagerLoop(journal, measured, cloud, identity, "https://localhost", job.workdir, copy)
    managing = asyncio.create_task(shell.run())
    asked = asyncio.create_task(asyncio.to_thread(cloud.asked.wait, LONG_S))
    try:
        await asyncio.wait((managing, asked), return_when=asyncio.FIRST_COMPLETED)
        if managing.done():
            managing.result()
        if story is not None:
            await story(shell)
            await shell.feed(TimerFired(at_s=shell.now_s()))  # what was fed is journalled
    finally:
        cloud.asked.set()
        managing.cancel()
        await asyncio.gather(managing, asked, return_exceptions=True)
        copy.close()
        journal.close()
        measured.close()


def test_an_intent_is_in_the_store_before_the_cloud_is_asked(job: JobDir) -> None:
    cloud = Cloud(job)
    asyncio.run(run(job, cloud))
    assert 0 < cloud.journalled <= cloud.copied


def test_a_manager_that_was_replaced_sends_the_cloud_nothing(job: JobDir) -> None:
    cloud = Cloud(job)
    with pytest.raises(FencedError):
        asyncio.run(run(job, cloud, replaced=True))
    assert cloud.journalled == 0
    assert not any(isinstance(event, LaunchRefused) for event in events(job))


def test_a_manager_that_sees_vms_of_a_later_one_ends_though_no_store_answers(
    job: JobDir,
) -> None:
    class Later(Cloud):
        def list_vms(self, job: str) -> Sequence[Vm]:
            if broken.is_symlink():
                broken.replace(store)  # at once: a copy under way would make a folder again
            return [a_vm("theirs", OFFER, intent="intent-2-0")]

    store = Path(stored(job).url.removeprefix("file://"))
    store.rename(store.with_name("folder"))
    store.symlink_to("folder")
    broken = store.with_name("broken")
    broken.symlink_to("/dev/null")
    with pytest.raises(FencedError):
        asyncio.run(run(job, Later(job)))
    assert not any(isinstance(event, VmsListed) for event in events(job))


def test_a_manager_fills_in_what_a_takeover_has_left_out(
    job: JobDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Measurements(job.measurements)) as measured:
        measured.write(trained(1, step) for step in range(1, 10))
        rows = measured.minibatches()
    end_of_copy = begin_replication(job)
    assert end_of_copy is not None
    assert asyncio.run(end_of_copy.finish())
    end_of_copy.close()
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "other"))
    found = take_over(f"file://{tmp_path}/store")

    async def story(shell: ManagerLoop) -> None:
        async with asyncio.timeout(LONG_S):
            while pending():
                await shell.feed(TimerFired(at_s=shell.now_s()))

    def pending() -> bool:
        with closing(Measurements(found.measurements, read_only=True)) as measured:
            return bool(measured.pending())

    assert pending()
    asyncio.run(run(found, Cloud(found), story=story))
    with closing(Measurements(found.measurements, read_only=True)) as measured:
        assert measured.minibatches() == rows


class Vanishing(Cloud):
    """Its only VM logs a line, and is gone."""

    def launch(self, request: LaunchRequest) -> LaunchResult:
        vm = a_vm("vm-1", OFFER, intent=request.intent)
        folder = self._job.cloud / "vms" / vm.vm_id
        folder.mkdir(parents=True, exist_ok=True)
        end = f"agent of {vm.vm_id} ends: terminated by signal"
        deaf = "notices are unavailable now: GET /metadata: 409"
        (folder / "agent.log").write_text(f"begun\n\x1b[1mno route to 10.0.0.1\n\n{end}\n{deaf}\n")
        super().launch(request)
        return LaunchResult(vms=(vm,))


def test_a_vm_that_is_gone_is_told_with_the_last_line_of_its_log(job: JobDir) -> None:
    async def story(loop: ManagerLoop) -> None:
        while (failing := loop.state.launches.failing) is None:
            now_s = loop.now_s()
            await loop.feed(VmsListed(at_s=now_s, asked_at_s=now_s, vms=()))
        assert failing.reason.endswith("its log: no route to 10.0.0.1")

    asyncio.run(run(job, Vanishing(job), story=story))


def test_what_a_vm_sends_as_its_logs_takes_little_room(job: JobDir) -> None:
    """Its token may be in other hands, and the disk is for the journal."""
    logs = tuple(LogTail(name=f"{n}.log", text="x" * 200_000) for n in range(100))

    asyncio.run(run(job, Cloud(job), story=sent(LogTails(vm_id="vm-1", logs=logs))))
    kept = (job.cloud / "vms" / "vm-1").iterdir()
    assert 0 < sum(log.stat().st_size for log in kept) <= 32 * 64 * 1024


def sent(tails: LogTails) -> Callable[[ManagerLoop], Awaitable[None]]:
    """Return a story in which a VM sends its logs."""
    return lambda loop: loop.requests.receive_logs(tails)


def test_the_logs_of_a_local_vm_stay_as_they_are(job: JobDir) -> None:
    """They are in its own folder, which is where those of others are kept."""
    folder = job.cloud / "vms" / "vm-1"
    folder.mkdir(parents=True)
    (folder / "agent.json").touch()
    (folder / "agent.log").write_text("begun\nended\n")
    tails = LogTails(vm_id="vm-1", logs=(LogTail(name="agent.log", text="ended\n"),))
    asyncio.run(run(job, Cloud(job), story=sent(tails)))
    assert (folder / "agent.log").read_text() == "begun\nended\n"
