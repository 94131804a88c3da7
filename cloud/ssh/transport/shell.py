"""Commands where a program of this machine leads, such as ``ssh`` or ``kubectl exec``.

As ``remote.Remote``, for places that are reached by what a person has set up for a program.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from spottrain.cloud.ssh.transport import hosts


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code of a command, and its combined stdout and stderr."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        """The last line that is not blank."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else f"ended with {self.code}"


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs shell commands at a place.

    Args:
        place: Its name, for messages.
        argv: Returns the command line that runs a shell command there.
        lost: Exit code of the program when it does not get there; None: it is not told apart.
    """

    place: str
    argv: Callable[[str], list[str]]
    lost: int | None = None

    def check(self, command: str, data: bytes = b"", timeout_s: float = 30.0) -> str:
        """Run a command that must succeed; return what it prints.

        Args:
            data: Its standard input.

        Raises:
            UnfitHostError: it failed.
            UnreachableHostError: the place is out of reach, or it took too long.
        """
        try:
            done = subprocess.run(
                self.argv(command),
                input=data,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise hosts.UnreachableHostError(
                f"{self.place}: no answer in {timeout_s:g} s"
            ) from error
        except OSError as error:
            raise hosts.UnreachableHostError(f"{self.place}: {error}") from error
        result = CommandResult(done.returncode, done.stdout.decode(errors="replace"))
        if result.code == self.lost:
            raise hosts.UnreachableHostError(f"{self.place}: {result.last_line}")
        if result.code:
            raise hosts.UnfitHostError(f"{self.place}: {result.last_line}")
        return result.output
