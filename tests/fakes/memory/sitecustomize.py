"""A machine with as much memory as ``FAKE_MEMORY_BYTES`` says.

Python imports this at its start where this folder is on PYTHONPATH. Nothing gives a program more
memory by it: it is for models without numbers, which take none.
"""

import os

_sysconf = os.sysconf


def _faked(name: str | int) -> int:
    if name == "SC_PHYS_PAGES":
        return int(os.environ["FAKE_MEMORY_BYTES"]) // _sysconf("SC_PAGE_SIZE")
    return _sysconf(name)


os.sysconf = _faked
