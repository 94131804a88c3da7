"""The ends of VMs' logs, as agents send them, in the job's folder."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from concurrent.futures import Future
from pathlib import Path

from spottrain.errors import one_line
from spottrain.files import make_folder
from spottrain.printable import printable
from spottrain.redaction import redacted
from spottrain.varuna_manager.core.model.records import VmRecord
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.wire.messages import LogTails

logger = logging.getLogger(__name__)

_MAX_LOGS, _LOG_BYTES = 32, 64 * 1024
"""Of a VM, whose token may be in other hands: the disk is for the journal."""
_LAST_BYTES, _LAST_WORDS = 16 * 1024, 300
"""What is read of a failed VM's log, and characters of its last line that are told."""


class VmLogs:
    """Keeps logs of VMs.

    They are written in a thread of its own, which the end of the process does not await: a
    disk that takes its time holds nothing else up.
    """

    def __init__(self, job: JobDir) -> None:
        self._job = job
        self._queue = queue.SimpleQueue[tuple[Future[None], Path, LogTails]]()
        self._waiting = set[str]()
        """VMs whose logs are to be written: later ones of the same VM come again."""
        self._thread: threading.Thread | None = None

    def _folder(self, vm_id: str, vm: VmRecord | None) -> Path:
        folder = self._job.cloud
        if vm is not None and (folder / vm.offer.cloud).is_dir():  # one of several
            folder /= vm.offer.cloud
        return folder / "vms" / vm_id

    def last_line(self, vm: VmRecord) -> str:
        """Return the last line of what a VM's agent has logged; empty if none is known."""
        return last_line(self._folder(vm.vm_id, vm), vm.vm_id)

    async def keep(self, tails: LogTails, vm: VmRecord | None) -> None:
        """Keep the ends of a VM's logs, until whole ones are fetched from it."""
        folder = self._folder(tails.vm_id, vm)
        if (folder / "agent.json").exists():
            return  # it is the VM's own, where its logs are
        if tails.vm_id in self._waiting:
            return
        self._waiting.add(tails.vm_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="vm logs", daemon=True)
            self._thread.start()
        written = Future[None]()
        written.add_done_callback(lambda _: self._waiting.discard(tails.vm_id))
        self._queue.put((written, folder, tails))
        try:
            await asyncio.wrap_future(written)
        except OSError as error:
            logger.warning("%s: logs are not kept: %s", tails.vm_id, error)

    def _run(self) -> None:
        while True:
            written, folder, tails = self._queue.get()
            if not written.set_running_or_notify_cancel():
                continue
            try:
                _write_logs(folder, self._job.path, tails)
            except OSError as error:
                written.set_exception(error)
            else:
                written.set_result(None)


def _write_logs(folder: Path, job: Path, tails: LogTails) -> None:
    make_folder(folder, within=job)
    known = {path.name for path in folder.iterdir()}
    for log in tails.logs:
        name = Path(log.name).name
        known.add(name)
        if len(known) > _MAX_LOGS:
            raise OSError(f"it has sent {_MAX_LOGS} logs under other names")
        text = log.text.encode(errors="backslashreplace")[-_LOG_BYTES:]
        (folder / name).write_bytes(text)


def last_line(folder: Path, vm_id: str) -> str:
    """Return the last line of an agent's log, cut; empty if none is known.

    Args:
        folder: Of the VM's logs.
    """
    try:
        with (folder / "agent.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            text = printable(redacted(log.read().decode(errors="replace")))
    except OSError:
        return ""
    said = map(one_line, text.splitlines())
    # No reasons: that it was told to end, and that its cloud no longer answers it.
    idle = f"agent of {vm_id} ends: terminated", "notices are unavailable now: "
    lines = [line for line in said if line and not any(words in line for words in idle)]
    return lines[-1][:_LAST_WORDS] if lines else ""
