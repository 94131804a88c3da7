"""A systemd user unit that keeps a job's manager through logout and reboot.

    python -m spottrain.varuna_manager.launch.unit <job_dir>

is the unit's condition: it exits with 1 if the job has ended, so that a job that was
stopped, or is done, does not begin anew with the machine.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from platformdirs import user_config_path

from spottrain.errors import SpottrainError
from spottrain.eventlog.folder import home
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.launch.submit import end_of

_CONDITION_ARGV = (
    sys.executable,
    "-P",
    "-m",
    "spottrain.varuna_manager.launch.unit",
)
_PASSED_ON = ("LD_LIBRARY_PATH", "SLURM_CONF")
"""What `module load slurm` may have set: Slurm's commands need it."""
_LINGERING = Path("/var/lib/systemd/linger")


class UnitError(SpottrainError):
    """The unit cannot be installed."""


def unit_name(job: JobDir) -> str:
    """Return the name of a job's unit."""
    return f"spottrain-{job.name}.service"


def secrets_file(job: JobDir) -> Path:
    """Return the file with environment variables that the unit reads, if there is one."""
    return user_config_path("spottrain") / f"{job.name}.env"


def unit_text(job: JobDir) -> str:
    """Return the unit: systemd.unit(5), systemd.service(5), systemd.exec(5).

    Only the manager is ended with it: its VMs train on, as when it dies. The exit codes
    of jobs that have ended are no reason to start it again, as the condition finds.
    """
    folder = str(job.path)
    lines = [
        "[Unit]",
        f"Description=spottrain manager of job {job.name}",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        f"ExecCondition={_command(*_CONDITION_ARGV, folder)}",
        f"ExecStart={_command(*job.command())}",
        f"WorkingDirectory={_path(folder)}",
        f"StandardOutput=append:{_path(str(job.log))}",
        f"StandardError=append:{_path(str(job.log))}",
        *(
            f"Environment={_quoted(f'{name}={value}')}"
            for name, value in (
                ("PATH", os.environ.get("PATH", os.defpath)),
                ("SPOTTRAIN_HOME", str(home())),
                *((name, os.environ[name]) for name in _PASSED_ON if name in os.environ),
            )
        ),
        f"EnvironmentFile=-{_path(str(secrets_file(job)))}",
        "KillMode=process",
        "SuccessExitStatus=143",
        "Restart=on-failure",
        "RestartSec=5",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _command(*argv: str) -> str:
    return " ".join(_quoted(word).replace("$", "$$") for word in argv)


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _path(path: str) -> str:
    return path.replace("%", "%%")


def is_available() -> bool:
    """Return True if this user has a systemd that runs."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    return Path(runtime, "systemd", "private").exists()


def install(job: JobDir) -> list[str]:
    """Write and enable a job's unit; return lines for the user.

    Raises:
        UnitError: systemd refuses, or there is none.
    """
    folder = user_config_path("systemd") / "user"
    path = folder / unit_name(job)
    if not is_available():
        raise UnitError(
            "there is no systemd for this user here: start the manager after a reboot "
            f"with 'spottrain resume {job.name}'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(unit_text(job), encoding="utf-8")
    _systemctl("daemon-reload")
    _systemctl("enable", unit_name(job))
    lines = [f"{path} is enabled"]
    start = f"systemctl --user start {unit_name(job)}"
    if manager := job.manager():
        lines.append(f"it takes over at the next boot, or now: kill {manager.pid} && {start}")
    else:
        _systemctl("start", unit_name(job))
    user = getpass.getuser()
    if not (_LINGERING / user).exists():
        lines.append(f"it ends when you log out until you run: loginctl enable-linger {user}")
    if needed := _variables(job):
        lines.append(f"put {', '.join(needed)} into {secrets_file(job)}, for you alone")
    return lines


def _variables(job: JobDir) -> list[str]:
    """Return the environment variables that the job file asks for."""
    config = job.config()
    return list(dict.fromkeys((*config.secrets, *config.notify.variables)))


def _systemctl(*arguments: str) -> None:
    done = subprocess.run(
        ["systemctl", "--user", *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]
        raise UnitError(f"systemctl --user {arguments[0]}: {said}")


def main(argv: Sequence[str]) -> int:
    """Return 0 if the job in folder ``argv[0]`` is to be managed, else 1."""
    job = JobDir(Path(argv[0]))
    return 1 if not job.journal.exists() or end_of(job) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
