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
from pathlib import Path

FILE = Path("/var/lib/spottrain/lease")
BOOT_S = 900
"""Time allowed until a manager is first heard, in addition to the lease."""
GRACE_S = 300
"""In addition to the lease: the agent checkpoints first, then gives up the lease."""
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
cat > /etc/systemd/system/spottrain-lease.service <<'END'
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
systemctl enable --now spottrain-lease.service
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
        end=end,
    )


def renew(file: Path = FILE) -> None:
    """Renew the lease after an answer of the manager; do nothing if there is none."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        os.utime(file)


def give_up(file: Path = FILE) -> None:
    """End the VM within seconds; do nothing if there is no lease."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        with file.open("r+") as lease:
            lease.write("given up\n")
        file.unlink()  # a script of an older version ends the VM once it is gone
