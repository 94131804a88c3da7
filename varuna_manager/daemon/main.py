"""The manager process: ``python -m spottrain.varuna_manager.daemon.main <job_dir>``.

It holds ``manager.lock`` while it runs, so that a job never has two managers, and writes
to ``manager.json`` where it can be reached. SIGTERM ends it as a crash would: VMs keep
training, and the next manager continues from the journal. Exit code: the job's, or 143.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvloop

from spottrain.cloud.port.provider import CloudProvider
from spottrain.errors import SpottrainError
from spottrain.eventlog.process import TERMINATED, run_process, until_terminated
from spottrain.files import PRIVATE, write_whole
from spottrain.logs import JsonLines
from spottrain.redaction import hide
from spottrain.varuna_manager.core.model.commands import Outcome
from spottrain.varuna_manager.core.model.errors import InternalError
from spottrain.varuna_manager.daemon.loop import ManagerLoop
from spottrain.varuna_manager.daemon.notify import Notifier
from spottrain.varuna_manager.daemon.server import (
    listen,
    make_server,
    tune_for_many_agents,
)
from spottrain.varuna_manager.daemon.tracking import FINISH_S, Trackers
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.identity import Identity, ensure_identity
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.manager_location import own_vm
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.varuna_manager.jobs.replication import (
    JournalReplication,
    backfill,
    begin_replication,
)
from spottrain.varuna_manager.launch.machines import ShutsDown, open_provider
from spottrain.varuna_manager.reporting.documents import report
from spottrain.varuna_manager.reporting.html.curves import read_curves
from spottrain.varuna_manager.reporting.html.page import PageError, page, write_page
from spottrain.version import is_older, software_version

logger = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
"""Where agents reach the manager: they are on this machine, or their calls are forwarded
to it (``CloudProvider.serve``). A manager on a VM of its own is reached at its private address."""
LEAVE_S = 5.0
"""How long a manager that is told to exit waits for the measurements to be written."""
COPY_WAIT_S = 5.0
"""How long a manager that is told to exit waits for the copy of its journal."""
DURABLE_COPY = "--durable-copy"
"""Second argument: no VM is rented before its intent is in the checkpoint store."""


class ManagerError(SpottrainError):
    """The manager cannot start."""


async def manage(
    job: JobDir,
    provider: CloudProvider,
    copy: JournalReplication | None = None,
    trackers: Trackers | None = None,
    notifier: Notifier | None = None,
) -> Outcome | None:
    """Manage a job to its end; return ``None`` if this process was told to exit.

    Args:
        job: A submitted job; the caller holds its lock.
        provider: The cloud to rent from.
        copy: Copies its journal to its checkpoint store, if given.
        trackers: Write its measurements, if given.
        notifier: Tells people what happens to it, if given.

    Raises:
        FencedError: another machine has taken the job over.
        SpottrainError: it cannot be managed: no port, a damaged journal or identity.
    """
    own = own_vm(job)
    address = ADDRESS if own is None else own.private_address
    listener = listen(job.path, address)
    url = f"https://{address}:{listener.getsockname()[1]}"
    identity = ensure_identity(job.path, (address, "localhost"))
    journal, measured = Journal(job.journal), Measurements(job.measurements)
    manager_loop = ManagerLoop(
        journal, measured, provider, identity, url, job.workdir, copy, trackers
    )
    _check_not_older(job, manager_loop.state.manager_version)
    server = make_server(manager_loop.channel, identity.path)
    _publish(job.path, url, identity, provider)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    write_s = LEAVE_S
    try:
        # Closed in a thread: it may wait for a VM's answer.
        outcome = await until_terminated(
            _run(manager_loop, notifier), threading.Thread(target=provider.close).start
        )
        write_s = FINISH_S
        if copy is not None:
            await _complete(measured, copy)
        _leave_page(job, manager_loop, measured)
        return outcome
    except asyncio.CancelledError:
        logger.info("exiting on request: VMs keep training; 'spottrain resume' continues the job")
        if copy is not None:
            await copy.finish(COPY_WAIT_S)
        return None
    finally:
        if trackers is not None:
            await trackers.finish(write_s, has_ended=manager_loop.has_ended)
        if copy is not None:
            copy.close()
        server.should_exit = True
        await serving
        listener.close()
        journal.close()
        measured.close()
        (job.path / "manager.json").unlink(missing_ok=True)


async def _complete(measured: Measurements, copy: JournalReplication) -> None:
    """Copy the rest of a job that has ended, and fill in its past if that is soon done."""
    try:
        await copy.finish()
        async with asyncio.timeout(FINISH_S):
            await backfill(measured, copy)
    except (TimeoutError, SpottrainError) as error:
        logger.warning("the job's files here are not complete: %s", error)


async def _run(manager_loop: ManagerLoop, notifier: Notifier | None) -> Outcome:
    """Run the loop to its end, and tell people what happens meanwhile."""
    if notifier is None:
        return await manager_loop.run()
    looking = asyncio.create_task(notifier.watch(lambda: manager_loop.state, manager_loop.now_s))
    limit_s = LEAVE_S
    try:
        outcome = await manager_loop.run()
        limit_s = FINISH_S
        return outcome
    finally:
        looking.cancel()
        notifier.look(manager_loop.state, manager_loop.now_s())
        await asyncio.to_thread(notifier.finish, limit_s)


def _check_not_older(job: JobDir, version: str) -> None:
    """Refuse to manage a job that a newer version has managed: its journal may say more.

    Raises:
        ManagerError: this software is older than ``version``.
    """
    if is_older(software_version(), version):
        raise ManagerError(
            f"job {job.name} was managed by spottrain {version}, this is "
            f"{software_version()}: install that version or a newer one"
        )


def logs_of(job: JobDir) -> Iterator[Path]:
    """Yield the logs of this process and of those that it starts."""
    yield from (job.log, job.json_log)
    yield from (job.path / "tracking").glob("*.log")
    yield from job.cloud.glob("*.log")


def _log_as_json(job: JobDir) -> None:
    """Write the log as JSON lines too; see ``manager.json_log``."""
    handler = logging.FileHandler(job.json_log)
    handler.setFormatter(JsonLines(job=job.name))
    logging.getLogger().addHandler(handler)


def _leave_page(job: JobDir, manager_loop: ManagerLoop, measured: Measurements) -> None:
    """Write the report of a job that has ended into its folder."""
    state, past = manager_loop.state, manager_loop.past
    try:
        document = report(state, past, False, state.now_s)
        curves = read_curves(measured)
        write_page(job.page, page(document, state, past, curves))
    except PageError as error:
        logger.warning("%s", error)
    else:
        logger.info("report: %s", job.page)


def _publish(job_dir: Path, url: str, identity: Identity, provider: CloudProvider) -> None:
    """Tell agents, commands and readers of metrics where the manager is."""
    provider.serve(url)
    write_whole(job_dir / "metrics.token", identity.metrics_token(), mode=PRIVATE)
    write_whole(job_dir / "ca.pem", identity.ca_pem, mode=PRIVATE)
    address = json.dumps({"pid": os.getpid(), "url": url})
    write_whole(job_dir / "manager.json", address)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the manager of the job in folder ``argv[0]``; see ``DURABLE_COPY``."""
    argv = sys.argv[1:] if argv is None else argv
    job = JobDir(Path(argv[0]).absolute())
    return run_manager(job, lambda: _manage(job, durable=DURABLE_COPY in argv))


def run_manager(job: JobDir, work: Callable[[], Outcome | None]) -> int:
    """Manage a job in this process, alone; return its exit code."""
    refusal = ManagerError(
        f"job {job.name} already has a manager: 'spottrain status {job.name}' shows it"
    )

    def managed() -> int:
        # A manager that was killed has left it; its pid may be anybody's by now.
        (job.path / "manager.json").unlink(missing_ok=True)
        tune_for_many_agents()
        try:
            outcome = work()
        except InternalError as error:
            logger.exception("this is a bug of spottrain, please report it:")
            logger.error("error: internal: %s", error)
            return 1
        if outcome is None:
            return TERMINATED
        logger.info("%s: %s", outcome.kind, outcome.reason)
        return outcome.exit_code

    return run_process(job, refusal, managed, lambda: logs_of(job))


def _manage(job: JobDir, *, durable: bool) -> Outcome | None:
    config = job.config()
    hide(config.secrets)
    copy = begin_replication(job, durable=durable)
    provider = open_provider(job)
    if config.manager.json_log:
        _log_as_json(job)
    facts = job.facts()
    trackers = Trackers(job, config.track, facts.callback_limit_s if facts.callbacks else None)
    notifier = Notifier(job, config.notify)
    try:
        outcome = uvloop.run(manage(job, provider, copy, trackers, notifier))
    finally:
        provider.close()
    if outcome is not None and isinstance(provider, ShutsDown):
        provider.shut_down()  # the job has ended: no process of it may stay
    return outcome


if __name__ == "__main__":
    sys.exit(main())
