"""The process on a host that prepares data; started by ``ssh.on_vm.host_agent``."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TAIL_BYTES = 4096


class BackgroundPreparation:
    """Prepares data in a process that dies with its VM, by the marker in its
    environment.

    Args:
        cache: Folder where data is kept.
        log: Its output is appended there.
        environment: Of the process.
        requests: The data, see ``request.to_json``.
        limit_s: How long it may take.
    """

    def __init__(
        self,
        cache: Path,
        log: Path,
        environment: Mapping[str, str],
        requests: str,
        limit_s: float,
    ) -> None:
        self._log = log
        command = [sys.executable, "-P", "-m", "spottrain.cloud.data"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, str(cache), str(limit_s)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                text=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(requests)

    def poll(self, wait_s: float) -> dict[str, Any]:
        """Wait at most ``wait_s`` for its end; return exit code and last line."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(wait_s)
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            tail = file.read().decode(errors="replace").strip()
        return {"code": code, "line": tail.rpartition("\n")[2]}
