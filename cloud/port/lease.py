"""A VM's lease: the VM ends itself when it has not heard from a manager for too long.

A shell script of root watches a file. The agent touches the file whenever its manager
answers, and writes into it to end the VM at once. Anybody on the VM may do both, but not
change the script: the folder is root's. Standard library only; the agent carries this
module.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from pathlib import Path

FILE = Path("/var/lib/spottrain/lease")
BOOT_S = 900
"""Time allowed until a manager is first heard, in addition to the lease."""
GRACE_S = 300
"""In addition to the lease: the agent checkpoints first, then gives up the lease."""
WAIT_S = 300.0
"""How long the boot script of a VM that lets us in and is prepared may still take."""
FILE_VARIABLE = "SPOTTRAIN_LEASE_FILE"
"""Environment variable of VMs whose lease is another file."""
_UNIT = "spottrain-lease.service"
_LOOK_S = 1.0
_CHECK_S = 10
SWITCH_OFF = "systemctl poweroff || poweroff -f"

_SCRIPT = """\
#!/bin/sh
# spottrain: this machine ends itself {bound_s} s after it last heard from its manager.
set -eu
mkdir -p {folder}
cat > {folder}/watch <<'END'
#!/bin/sh
# Counts looks and compares no dates: a clock that is set must neither end nor keep a machine.
left=$(({bound_s} + {boot_s}))
seen=$(stat -c %y {file} 2>/dev/null)
while sleep {check_s}; do
    now=$(stat -c %y {file} 2>/dev/null || echo gone)
    [ "$now" = "$seen" ] || left={bound_s}
    seen=$now left=$((left - {check_s}))
    if [ "$now" = gone ] || [ -s {file} ] || [ $left -lt 0 ]; then
        {end}
    fi
done
END
cat > /etc/systemd/system/{unit} <<'END'
[Service]
ExecStart=/bin/sh {folder}/watch
Restart=always
[Install]
WantedBy=multi-user.target
END
# Agents are started over SSH: sessions take their limits from here (limits.conf(5)).
mkdir -p /etc/security/limits.d
echo '* - memlock unlimited' > /etc/security/limits.d/spottrain.conf
touch {file}
chmod 755 {folder}
chmod 666 {file}
systemctl daemon-reload
systemctl enable --now {unit}
"""


def boot_script(lease_s: float, end: str = SWITCH_OFF) -> str:
    """Return the script that a VM runs as root at its first boot; it holds no secret.

    Args:
        lease_s: How long the VM keeps running without a manager.
        end: The shell command that ends the VM and its billing, tried every few
            seconds.
    """
    return _SCRIPT.format(
        bound_s=math.ceil(lease_s) + GRACE_S,
        folder=FILE.parent,
        file=FILE,
        check_s=_CHECK_S,
        boot_s=BOOT_S,
        unit=_UNIT,
        end=end,
    )


def renew(file: Path = FILE) -> None:
    """Renew the lease after an answer of the manager; do nothing if there is none."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        os.utime(file)


def give_up(file: Path = FILE) -> None:
    """End the VM within seconds; do nothing if there is no lease."""
    with (
        contextlib.suppress(FileNotFoundError, PermissionError),
        file.open("r+") as lease,
    ):
        lease.write("given up\n")


def await_lease(wait_s: float = WAIT_S) -> str:
    """Wait, on a rented VM, until it would end itself without a manager.

    Images accept logins before their boot script has run.

    Returns:
        What is wrong, and what to do; empty: nothing.
    """
    end_s = time.monotonic() + wait_s
    while (missing := _missing()) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    if not missing:
        return ""
    return (
        f"would not end itself without a manager: {missing}; the image must run a boot "
        "script (cloud-init on AWS and Azure, Google's guest agent on GCP) under systemd"
    )


def _missing() -> str:
    file = Path(os.environ.get(FILE_VARIABLE, FILE))
    if not file.is_file():
        return f"{file} is missing"
    try:
        asked = subprocess.run(
            ["systemctl", "is-active", _UNIT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        return f"systemctl cannot be run ({error})"
    said = asked.stdout.decode(errors="replace").strip() or "unknown"
    return f"{_UNIT} is {said}" if asked.returncode else ""
