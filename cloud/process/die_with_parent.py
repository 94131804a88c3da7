"""Runs a command that the kernel kills when its parent dies; standard library only.

``python die_with_parent.py PARENT_PID COMMAND...``: a program of its own, since code
between fork and exec is not safe in a parent with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request the signal, then execute the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent died before it could be watched")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
