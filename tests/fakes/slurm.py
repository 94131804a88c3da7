"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each of four nodes.

Debian's build lets several slurmd run on one host. Needs to be root: slurmd starts jobs as
their users.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.sshd import Sshd, keygen

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
WHY_NO_SLURM = ""
"""Why there can be no cluster here, if there cannot."""
if _missing:
    WHY_NO_SLURM = f"needs {', '.join(_missing)}: apt-get install slurm-wlm munge"
elif os.geteuid() != 0:
    WHY_NO_SLURM = "needs to be root: slurmd starts jobs as their users"

_DATABASE = ("mariadbd", "slurmdbd", "sacctmgr", "sacct")
_lacking = [name for name in _DATABASE if shutil.which(name, path=_PATH) is None]
WHY_NO_ACCOUNTS = WHY_NO_SLURM
"""Why a cluster cannot keep accounts here, if it cannot."""
if _lacking and not WHY_NO_SLURM:
    packages = "mariadb-server-core slurmdbd slurm-wlm-mysql-plugin"
    WHY_NO_ACCOUNTS = f"needs {', '.join(_lacking)}: apt-get install {packages}"

NODES = 4
GRACE_S = 300
"""Longer than any hand-over takes, on however slow a machine."""
_PATIENCE_S = 600.0
_JOBS = 60_000_000
"""Clusters that run side by side here must not use the same ids: processes of VMs, whose ids
these are, are found by them."""
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={root}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
KillWait=5
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdSpoolDir={root}/spool-%n
StateSaveLocation={root}/state
FirstJobId={first_job}
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
SlurmctldPort={control_port}
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
JobAcctGatherType=jobacct_gather/none
{accounting}
NodeName=DEFAULT CPUs=1 RealMemory=2000 State=UNKNOWN
{nodes}
PartitionName=preempt Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \
PreemptMode=CANCEL GraceTime={grace_s}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


_NO_ACCOUNTS = "AccountingStorageType=accounting_storage/none"
_ACCOUNTS = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={root}/munge.socket
AccountingStoreFlags=job_comment"""
_DATABASE_CONFIG = """
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={root}/log/slurmdbd.log
PidFile={root}/slurmdbd.pid
PluginDir={plugins}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=root
StorageLoc=accounts
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster with the partitions ``preempt`` and ``urgent``, which preempts it."""

    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """Selects this cluster for every command of Slurm's."""
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def ask(self, *argv: str) -> str:
        """Return what a command of Slurm's prints."""
        done = subprocess.run(
            argv,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
            cwd=self.root,
        )
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def jobs(self) -> list[str]:
        """Return the ids of all jobs that have not ended."""
        return self.ask("squeue", "-h", "-o", "%i").split()

    def occupy(self, partition: str, nodes: int = 1) -> str:
        """Have a job of someone else's run on some nodes, or wait for them; return its id."""
        argv = ("sbatch", "--parsable", "-p", partition, f"-N{nodes}", "-o", "/dev/null")
        return self.ask(*argv, "--wrap", "sleep 100000").strip()

    def cancel_all(self) -> None:
        """End every job; return when all have left their nodes."""
        self.ask("scancel", "--user=root")
        _until("the queue is empty", lambda: not self.jobs())

    def stop_controller(self) -> None:
        """End slurmctld, as a crash of its machine would."""
        _kill([int((self.root / "slurmctld.pid").read_text())])

    def start_controller(self) -> None:
        """Start slurmctld; it takes its state up where it was."""
        _run(["slurmctld", "-f", str(self.root / "slurm.conf")], self.root)

    def kill_job(self, number: str) -> None:
        """End what a job has started; its node lives."""
        _kill([pid for pid, job in self._tasks() if job["SLURM_JOB_ID"] == number])

    def kill_node(self, node: str) -> None:
        """End a node as a power cut would: its slurmd, its steps, and what they started.

        The controller notices by itself within minutes; it is told.
        """
        _kill([int((self.root / f"slurmd-{node}.pid").read_text())])
        _kill(self._processes(node))
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")

    def _processes(self, node: str = "") -> list[int]:
        """Return the processes of jobs; first those of Slurm's that watch them."""
        tasks = [pid for pid, job in self._tasks() if node in ("", job.get("SLURMD_NODENAME"))]
        watching = []
        for pid in tasks:
            with contextlib.suppress(OSError):
                watching.append(_parent(pid))
        return [pid for pid in watching if pid > 1 and pid not in tasks] + tasks

    def _tasks(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Return the processes that jobs have started, with their environments."""
        return ((pid, job) for pid, job in self._all() if "SLURM_JOB_ID" in job)

    def _all(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Return all processes that know this cluster, with their environments."""
        conf = str(self.root / "slurm.conf")
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                text = (folder / "environ").read_bytes().decode(errors="replace")
                variables = dict(x.partition("=")[::2] for x in text.split("\0"))
                if variables.get("SLURM_CONF") == conf:
                    yield int(folder.name), variables

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        _run(["slurmd", "-N", node, "-f", str(self.root / "slurm.conf")], self.root)


@contextlib.contextmanager
def a_slurm(root: Path, *lines: str, keeps_accounts: bool = False) -> Iterator[Slurm]:
    """Run a cluster in a folder of its own.

    Args:
        lines: Further ones of slurm.conf.
        keeps_accounts: By slurmdbd, in a database of its own.
    """
    for name in ("state", "log"):
        (root / name).mkdir(parents=True)
    control, accounts, database, *ports = _free_ports(NODES + 3)
    host = socket.gethostname().partition(".")[0]
    here = f"NodeHostname={host} NodeAddr=127.0.0.1"
    nodes = "\n".join(f"NodeName=n{n} {here} Port={port}" for n, port in enumerate(ports, 1))
    text = _CONFIG.format(
        root=root,
        host=host,
        first_job=1 + secrets.randbelow(_JOBS),
        control_port=control,
        nodes=nodes,
        grace_s=GRACE_S,
        accounting=_ACCOUNTS.format(root=root, port=accounts) if keeps_accounts else _NO_ACCOUNTS,
    )
    (root / "slurm.conf").write_text("\n".join([text, *lines, ""]))
    key = root / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(1024))
    cluster = Slurm(root)
    try:
        _run(_munged(root, key), root)
        if keeps_accounts:
            _start_accounts(cluster, accounts, database)
        cluster.start_controller()
        for n in range(1, NODES + 1):
            cluster.start_node(f"n{n}")
        _until("all nodes are idle", lambda: _idle(cluster) == NODES)
        yield cluster
    finally:
        _end(cluster)


LOGIN = "login"
"""The name by which ``ssh`` knows a cluster's login node."""


@contextlib.contextmanager
def a_login_node(folder: Path, cluster: Slurm) -> Iterator[Sshd]:
    """Let this machine be reached over SSH, where alone the cluster is known."""
    keygen(folder / "login_key")
    sshd = Sshd(folder / "login-node", folder / "login_key", environment=cluster.environment)
    sshd.folder.mkdir()
    sshd.start()
    try:
        yield sshd
    finally:
        sshd.stop()


def _start_accounts(cluster: Slurm, port: int, database_port: int) -> None:
    root, data = cluster.root, cluster.root / "database"
    data.mkdir()
    options = {
        "user": "root",
        "datadir": data,
        "bind-address": "127.0.0.1",
        "port": database_port,
        "socket": data / "socket",
        "pid-file": root / "database.pid",
        "log-error": root / "log" / "database.log",
        "innodb-buffer-pool-size": "64M",
        "innodb-log-file-size": "8M",
    }
    given = (f"--{name}={value}" for name, value in options.items())
    programs = {name: shutil.which(name, path=_PATH) or name for name in ("mariadbd", "slurmdbd")}
    share = Path(programs["mariadbd"]).parents[1] / "share" / "mysql"
    own = ["--no-defaults", "--skip-grant-tables", f"--lc-messages-dir={share}"]
    _run(["setsid", "--fork", programs["mariadbd"], *own, *given], root)
    _until("the database listens", lambda: _listens(database_port))
    found = Path(programs["slurmdbd"]).parents[1].glob("lib/*/slurm-wlm")
    plugins = dict.fromkeys(map(str, (*found, *Path("/usr").glob("lib/*/slurm-wlm"))))
    config = root / "slurmdbd.conf"
    config.touch(mode=0o600)
    config.write_text(
        _DATABASE_CONFIG.format(
            root=root, port=port, database_port=database_port, plugins=":".join(plugins)
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
    subprocess.run([programs["slurmdbd"]], env=environment, check=True, cwd=root)
    _until("slurmdbd listens", lambda: _listens(port))
    cluster.ask("sacctmgr", "--immediate", "add", "cluster", "test")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _munged(root: Path, key: Path) -> list[str]:
    options = {
        "socket": root / "munge.socket",
        "key-file": key,
        "pid-file": root / "munged.pid",
        "log-file": root / "log" / "munged.log",
        "seed-file": root / "munged.seed",
    }
    return ["munged", "--force", *(f"--{name}={value}" for name, value in options.items())]


def _idle(cluster: Slurm) -> int:
    states = cluster.ask("sinfo", "-h", "-N", "-p", "preempt", "-o", "%T").split()
    return states.count("idle")


def _end(cluster: Slurm) -> None:
    for path in cluster.root.glob("*.pid"):
        with contextlib.suppress(ValueError):
            _kill([int(path.read_text())])
    _kill([pid for pid, _ in cluster._all() if _name(pid) == "slurmstepd"])
    _kill(cluster._processes())


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _until("they are gone", lambda: not any(_runs(pid) for pid in pids))


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _runs(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _run(argv: Sequence[str], root: Path) -> None:
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(root / "slurm.conf")}
    subprocess.run(argv, env=environment, check=True, cwd=root, stdin=subprocess.DEVNULL)


def _until(what: str, holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.1)
