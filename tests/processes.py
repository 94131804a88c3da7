"""Tests in several processes: forks of one that has imported and collected everything.

To import the product, torch and all tests takes half a minute of a core on a fresh clone;
pytest-xdist has every process do so.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from typing import Any

import pytest

NUMBER = "SPOTTRAIN_TEST_PROCESS"
"""Environment variable with the number of a test process."""
_LISTENERS = ("terminalreporter", "tiers", "lfplugin", "nfplugin", "stepwiseplugin")
"""Plugins that hear of each test once, in the process that has forked the others."""

_CONTEXT = multiprocessing.get_context("fork")

Group = list[pytest.Item]


def groups(items: Sequence[pytest.Item], scope: Callable[[str], str]) -> list[Group]:
    """Return what runs in one process: tests that follow each other, of one scope."""
    return [list(some) for _, some in itertools.groupby(items, lambda item: scope(item.nodeid))]


class Between:
    """Stands for the next test where that is of another file: what belongs to the whole
    session stays, all else is torn down."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[Any]:
        """Return the nodes that the next test needs."""
        return [self._session]


@dataclass
class Process:
    """A test process, as the one that has forked it sees it."""

    number: int
    handle: ForkProcess
    link: Connection
    left: list[str] = field(default_factory=list)
    """Tests of its group that it has yet to report, in order."""


class Processes:
    """The plugin that runs collected tests in forks, a group of them at a time.

    Args:
        count: Number of processes.
        scope: Returns from a test's id what it runs in one process with.
    """

    def __init__(self, count: int, scope: Callable[[str], str]) -> None:
        self._count, self._scope = count, scope

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests; the process that collected them only reports."""
        config = session.config
        if session.testsfailed or config.option.collectonly:
            return None  # pytest says why nothing runs
        every = groups(session.items, self._scope)
        waiting = list(range(len(every)))[::-1]
        config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        numbers = itertools.count()
        running: dict[Connection, Process] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._count:
                    process = _fork(session, next(numbers), every, running)
                    running[process.link] = process
                    _give(process, every, waiting)
                for link in wait(list(running)):
                    assert isinstance(link, Connection)
                    process = running[link]
                    if not _hear(process, config, every, waiting):
                        del running[link]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for process in running.values():
                process.handle.terminate()
                process.handle.join()
        return True


def _give(process: Process, every: Sequence[Group], waiting: list[int]) -> None:
    """Give a process its next group, or let it end."""
    number = waiting.pop() if waiting else None
    group = [] if number is None else every[number]
    process.left = [item.nodeid for item in group]
    process.link.send(number)


def _hear(
    process: Process, config: pytest.Config, every: Sequence[Group], waiting: list[int]
) -> bool:
    """Take one message of a process in; return False once it has ended."""
    try:
        kind, content = process.link.recv()
    except (EOFError, OSError):
        process.handle.join()
        process.link.close()
        if process.left or process.handle.exitcode:
            _report_death(process, config)
        return False
    hook = config.hook
    if kind == "start":
        nodeid, location = content
        hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
    elif kind == "report":
        report = hook.pytest_report_from_serializable(config=config, data=content)
        hook.pytest_runtest_logreport(report=report)
    elif kind == "finish":
        nodeid, location = content
        process.left.remove(nodeid)
        hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
    else:
        _give(process, every, waiting)
    return True


def _report_death(process: Process, config: pytest.Config) -> None:
    """Fail the test that has ended its process, and those that it was yet to run."""
    why = f"test process {process.number} ended with {process.handle.exitcode} in it"
    for nodeid in process.left or ["(the end of a test process)"]:
        location = (nodeid.partition("::")[0], None, nodeid)
        report = pytest.TestReport(nodeid, location, {}, "failed", why, "call", sections=())
        config.hook.pytest_runtest_logreport(report=report)
        why = f"not run: test process {process.number} had ended"


# --- In a fork ------------------------------------------------------------------------


def _fork(
    session: pytest.Session,
    number: int,
    every: Sequence[Group],
    others: Iterable[Connection],
) -> Process:
    ours, theirs = Pipe()
    not_mine = [ours, *others]
    arguments = session, number, every, theirs, not_mine
    process = _CONTEXT.Process(target=_run, args=arguments)
    process.start()
    theirs.close()
    return Process(number, process, ours)


def _become(config: pytest.Config, number: int) -> None:
    """Be a test process of its own: output, temporary folders, plugins."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ[NUMBER] = str(number)
    manager = config.pluginmanager
    capture = manager.getplugin("capturemanager")
    assert capture is not None, "a part of pytest"
    capture.stop_global_capturing()  # its file has one position for all forks
    capture.start_global_capturing()
    for name in _LISTENERS:
        if (plugin := manager.getplugin(name)) is not None:
            manager.unregister(plugin)
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"process-{number}"
    factory._basetemp.mkdir(mode=0o700)
    gc.enable()


def _run(
    session: pytest.Session,
    number: int,
    every: Sequence[Group],
    link: Connection,
    not_mine: Iterable[Connection],
) -> None:
    """Run the groups that the other process names, until it names none."""
    for other in not_mine:
        other.close()
    _become(session.config, number)
    session.config.pluginmanager.register(_Reporter(session.config, link))
    while (chosen := link.recv()) is not None:
        group = every[chosen]
        following: Iterator[Any] = iter([*group[1:], Between(session)])
        for item, nextitem in zip(group, following, strict=True):
            link.send(("start", (item.nodeid, item.location)))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            link.send(("finish", (item.nodeid, item.location)))
        link.send(("idle", None))
    session._setupstate.teardown_exact(None)
    link.close()
    os._exit(0)  # threads that a failed test has left are not waited for


class _Reporter:
    """The plugin that tells the other process how tests went."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))
