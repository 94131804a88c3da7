"""The host agent: serves a manager's requests on a host while it is connected.
Standard library only.

Its source is sent over the SSH connection and run by the host's own Python. It answers
requests on stdin, one JSON line each, on stdout:

    {"id": 7, "op": "claim", ...}  ->  {"id": 7, "ok": ...} or {"id": 7, "error": "..."}

A host is one VM at a time. Its folder holds

    claim.json      the VM, its owner and the host's name; written by the first to claim it
    <vm_id>/        the VM's own: agent.json, workdir/, logs, vm.lock held by its keeper
    package-<sha>/  our software; the claim names the one that the agent is of

and is removed when the VM has ended and its logs were fetched. Changing a claim takes a
lock on the parent folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

_LOG_BYTES = 256 * 1024
"""Size of the part of each log that is kept, at its end."""
_NCCL = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_FIND_SOFTWARE = f"""
import importlib.metadata, importlib.util, json, os

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""

names = ("torch", "numpy", "safetensors", "obstore", *{_NCCL!r})
found = {{name: version(name) for name in names}}
torch = importlib.util.find_spec("torch")
found["build"] = ""
if torch is not None and torch.origin is not None:
    version = os.path.join(os.path.dirname(torch.origin), "version.py")
    if os.path.exists(version):
        with open(version) as file:
            found["build"] = file.read()
print(json.dumps(found))
"""
"""Versions of packages as a new process finds them; "" if absent."""
_KEEPER_S = 30.0
_PEER_S = 10.0
"""How long another VM of the region may be silent."""
_ARCHIVES = "archives"
_PIP_CACHE, _WHEELS_LOG = "pip-cache", "wheels.log"
"""In a VM's folder."""
LEASE_FILE = Path("/var/lib/spottrain/lease")
"""``cloud.port.lease.FILE``: this module comes to hosts without the package."""
_RENEW_S = 60.0


class RefusedError(Exception):
    """A request cannot be carried out; the message is for the user."""


class HostAgent:
    """Operations on this host, one method each."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._claim_file = root / "claim.json"
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._data: Any = None
        self._shared: Any = None
        self._sharing = threading.Lock()

    # --- claims ---------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the claim and its state: free, claimed, running or over."""
        with self._locked():
            claim = self._claim()
            return {"claim": claim, "state": self._state(claim)}

    def claim(self, claim: dict[str, Any]) -> Any:
        """Claim the host unless it is taken; return the current claim."""
        with self._locked():
            current = self._claim()
            state = self._state(current)
            if state == "over" and current["owner"] != claim["owner"]:
                self._clear(current["vm_id"])
                state = "free"
            if state != "free":
                return current
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write_claim(claim)
            return claim

    def forward_calls(self, vm_id: str, port: int, relay_at: str = "") -> str:
        """Forward the agent's calls over this connection; return the address for calls.

        ``port`` is the forwarded port on loopback. The connection that forwarded calls
        before is ended. With ``relay_at``, a private address, calls of other VMs are
        accepted there as well.
        """
        with self._locked():
            claim, ours = self._claim_of(vm_id), os.getppid()
            carrier = {"pid": ours, "started": _started_at(ours)}
            old = claim.get("carrier", carrier)
            if old != carrier and _started_at(old["pid"]) == old["started"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(old["pid"], signal.SIGTERM)
            self._write_claim({**claim, "carrier": carrier})
        address = f"127.0.0.1:{port}"
        if relay_at:
            relay = self._import("spottrain.cloud.ssh.on_vm.relay").Relay(relay_at, port)
            address = f"{relay_at}:{relay.port}"
        self.set_manager_address(vm_id, address)
        return address

    def set_manager_address(self, vm_id: str, address: str) -> None:
        """Set the address to which the VM's agent calls from now on."""
        with self._locked():
            self._claim_of(vm_id)
            _write_private(self._root / vm_id / "manager.address", address.encode())

    def end(self, vm_id: str) -> dict[str, str]:
        """End a VM, free the host, and return the VM's logs by name."""
        with self._locked():
            claim = self._claim()
            if claim is None or claim["vm_id"] != vm_id:
                return {}
            return self._clear(vm_id)

    def clear(self, vm_id: str) -> dict[str, str]:
        """End a VM as ``end`` does, and remove its data; the machine is for another job.

        One that is free is cleared already.
        """
        with self._locked():
            claim = self._claim()
            if claim is not None and claim["vm_id"] != vm_id:
                raise RefusedError(f"gone: VM {vm_id} is no longer on this host")
            logs = {} if claim is None else self._clear(vm_id)
            shutil.rmtree(self._data_folder, ignore_errors=True)
        if self._data_folder.exists():
            raise RefusedError(f"{self._data_folder} cannot be removed; check who owns its files")
        if is_given_up():
            raise RefusedError(f"VM {vm_id} has given its lease up and ends")
        return logs

    @property
    def _data_folder(self) -> Path:
        return self._root.with_name(f"{self._root.name}-data")

    def _clear(self, vm_id: str) -> dict[str, str]:
        self._kill(vm_id)
        logs = {path.name: _tail(path) for path in sorted((self._root / vm_id).glob("*.log"))}
        shutil.rmtree(self._root, ignore_errors=True)
        if self._claim_file.exists():
            raise RefusedError(f"{self._root} cannot be removed; check who owns its files")
        return logs

    def _kill(self, vm_id: str) -> None:
        if not any(self._root.glob("package-*")):
            return  # no process of the VM was ever started
        self._import("spottrain.cloud.process.tree").kill_all([vm_id])

    def _import(self, name: str) -> Any:
        """Return a module of our software that was sent here."""
        sys.path.insert(0, str(min(self._root.glob("package-*"))))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.pop(0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        place = os.open(self._root.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(place, fcntl.LOCK_EX)
            yield
        finally:
            os.close(place)

    def _claim(self) -> Any:
        try:
            claim = json.loads(self._claim_file.read_text())
        except FileNotFoundError:
            return None
        other = claim.pop("machine", platform.node())
        if other != platform.node():
            raise RefusedError(
                f"{self._root} is that of {other}, too: both hosts have the same home "
                "folder; set ssh.folder to one of their own, such as /var/tmp/spottrain-me"
            )
        return claim

    def _claim_of(self, vm_id: str) -> dict[str, Any]:
        claim: dict[str, Any] | None = self._claim()
        if claim is None or claim["vm_id"] != vm_id or self._state(claim) == "over":
            raise RefusedError(f"gone: VM {vm_id} is no longer on this host")
        return claim

    def _write_claim(self, claim: dict[str, Any]) -> None:
        marked = {**claim, "machine": platform.node()}
        _write_private(self._claim_file, json.dumps(marked).encode())

    def _state(self, claim: dict[str, Any] | None) -> str:
        for keeper in self._keepers:
            keeper.poll()  # leave no zombie
        if claim is None:
            return "free"
        if _is_locked(self._root / claim["vm_id"] / "vm.lock"):
            return "running"
        given_up = claim.get("started") or time.time() > claim["expires_at"]
        return "over" if given_up else "claimed"

    def await_lease(self, wait_s: float) -> str:
        """Wait for the VM's lease; see ``cloud.port.lease``."""
        wrong: str = self._import("spottrain.cloud.port.lease").await_lease(wait_s)
        return wrong

    # --- preparation and start ------------------------------------------------------

    def unpack(self, vm_id: str, name: str, archive: Path, keep: str = "") -> None:
        """Unpack an archive into ``name`` atomically.

        Args:
            name: Folder below ours.
            archive: Is moved or removed.
            keep: Its SHA-256: it is kept, for ``share``.
        """
        draft = archive.with_suffix(".draft")
        try:
            self._extract(vm_id, archive, draft)
            with self._locked():
                self._claim_of(vm_id)  # the VM may have ended meanwhile
                target = self._root / name
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)
                draft.rename(target)
                if keep:
                    kept = self._root / _ARCHIVES / keep
                    kept.parent.mkdir(mode=0o700, exist_ok=True)
                    archive.rename(kept)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise RefusedError(f"{name} cannot be unpacked: {error}") from error
        finally:
            archive.unlink(missing_ok=True)
            shutil.rmtree(draft, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._root.rmdir()  # if the VM has ended

    def _extract(self, vm_id: str, archive: Path, draft: Path) -> None:
        self._claim_of(vm_id)
        draft.mkdir(mode=0o700)
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(draft, filter="data")
            else:  # Python before 3.11.4
                tar.extractall(draft, _plain_members(tar, draft))

    def share(self, vm_id: str, digest: str, address: str) -> str:
        """Serve a kept archive to other VMs of the region; return its URL.

        Args:
            digest: SHA-256 of the archive.
            address: Private address of this VM.
        """
        self._claim_of(vm_id)
        kept = self._root / _ARCHIVES / digest
        if not kept.is_file():
            raise RefusedError(f"has no archive {digest}")
        with self._sharing:
            if self._shared is None:
                share = self._import("spottrain.cloud.ssh.on_vm.share").Share
                self._shared = share(address)
            url: str = self._shared.url_of(kept)
            return url

    def receive(self, vm_id: str, name: str, url: str, digest: str) -> str:
        """Fetch an archive that another VM shares, and unpack and keep it.

        Args:
            name: Folder below ours, to unpack it into.
            url: From ``share`` of the other VM.
            digest: SHA-256 that it must have.

        Returns:
            Why it could not be fetched; empty if it was.
        """
        self._claim_of(vm_id)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._root / f"arriving-{os.getpid()}-{digest}"
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        found = hashlib.sha256()
        try:
            with (
                no_proxy.open(url, timeout=_PEER_S) as answer,
                path.open("wb") as file,
            ):
                while chunk := answer.read(1 << 18):
                    found.update(chunk)
                    file.write(chunk)
        except (OSError, http.client.HTTPException) as error:
            path.unlink(missing_ok=True)
            return f"{type(error).__name__}: {error}"
        if found.hexdigest() != digest:
            path.unlink()
            return "it is not what was sent"
        self.unpack(vm_id, name, path, digest)
        return ""

    def received(self) -> int:
        """Return the bytes that this machine has received over networks."""
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
        return sum(int(line.partition(":")[2].split()[0]) for line in lines)

    def has(self, names: list[str]) -> list[bool]:
        """Return for each folder whether it exists."""
        return [(self._root / name).is_dir() for name in names]

    def setup(
        self,
        vm_id: str,
        script: str,
        environment: dict[str, str],
        limit_s: float,
        pins: Sequence[str] = (),
        cache: bool = False,
    ) -> dict[str, Any]:
        """Run the user's setup once per VM; return its exit code and last output.

        Args:
            script: For ``/bin/sh -e``.
            environment: Of the script.
            pins: Requirements that bind what pip and uv install, unless the environment
                names others.
            cache: Keep what pip downloads, for ``publish_wheels``.
        """
        self._claim_of(vm_id)
        folder = self._root / vm_id
        done, log = folder / "setup.done", folder / "setup.log"
        if done.exists():
            return {"code": 0, "output": ""}
        (folder / "setup.sh").write_text(script, encoding="utf-8")
        environment = {**_installing(folder, pins, cache), **environment}
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["/bin/sh", "-e", str(folder / "setup.sh")],
                cwd=folder / "workdir",
                env=self._environment(vm_id, environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = _wait(process, limit_s)
            finally:
                # Background processes of setup would disturb training.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        with self._locked():  # wait for an ``end`` that killed setup
            self._claim_of(vm_id)
            if code == 0:
                done.touch()
        return {"code": code, "output": _tail(log, 4096)}

    def fetch_wheels(
        self,
        vm_id: str,
        package: str,
        place: str,
        digest: str,
        environment: dict[str, str],
        limit_s: float,
    ) -> dict[str, Any]:
        """Fetch what ``setup`` of an earlier VM downloaded; see ``wheels``.

        Args:
            package: Folder of our software.
            place: Where the wheels are published.
            digest: Of their index.
            environment: With the credentials of that store.

        Returns:
            ``bytes``, None if there are none; or ``error``.
        """
        self._claim_of(vm_id)
        folder = self._root / vm_id
        if (folder / "setup.done").exists():
            return {"bytes": None}
        cache = str(folder / _PIP_CACHE)
        return self._ask_wheels(vm_id, package, environment, limit_s, "fetch", place, cache, digest)

    def publish_wheels(
        self,
        vm_id: str,
        package: str,
        place: str,
        environment: dict[str, str],
        limit_s: float,
    ) -> dict[str, Any]:
        """Begin to publish what ``setup`` downloaded.

        Args:
            package: Folder of our software.
            place: Where to.
            environment: With the credentials of that store.
            limit_s: Time limit of the answer.

        Returns:
            ``digest`` of its index, None if there is nothing; or ``error``.
        """
        cache = self._root / vm_id / _PIP_CACHE
        if not cache.is_dir() or not any(cache.iterdir()):
            return {"digest": None}
        common = vm_id, package, environment
        answer = self._ask_wheels(*common, limit_s, "digest", str(cache))
        if "error" not in answer:
            process = self._spawn_wheels(*common, "publish", place, str(cache))
            threading.Thread(target=process.wait, daemon=True).start()
        return answer

    def _ask_wheels(
        self,
        vm_id: str,
        package: str,
        environment: dict[str, str],
        limit_s: float,
        *arguments: str,
    ) -> dict[str, Any]:
        """Return what ``wheels`` answers, or ``error``."""
        process = self._spawn_wheels(vm_id, package, environment, *arguments)
        code = _wait(process, limit_s)
        if code is None:
            process.kill()
            process.wait()
            return {"error": f"took longer than {limit_s:g} s"}
        said = _tail(self._root / vm_id / _WHEELS_LOG, 1 << 20).splitlines()
        if code or not said:
            return {"error": said[-1] if said else f"ended with {code}"}
        answer: dict[str, Any] = json.loads(said[-1])
        return answer

    def _spawn_wheels(
        self, vm_id: str, package: str, environment: dict[str, str], *arguments: str
    ) -> subprocess.Popen[bytes]:
        module = "spottrain.cloud.ssh.on_vm.wheels"
        with (self._root / vm_id / _WHEELS_LOG).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                env=self._environment(vm_id, environment, package),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def data(self, vm_id: str, package: str, environment: dict[str, str], **arguments: Any) -> Any:
        """Prepare the job's data; return progress by ``cloud.data.background``."""
        self._claim_of(vm_id)
        wait_s = arguments.pop("wait_s")
        if self._data is None:
            given = self._environment(vm_id, environment, package)
            cache = self._data_folder  # it stays on the host
            running = self._import("spottrain.cloud.data.background").BackgroundPreparation
            log = self._root / vm_id / "data.log"
            self._data = running(cache=cache, log=log, environment=given, **arguments)
        seen = self._data.poll(wait_s)
        if seen["code"] is not None:
            self._data = None  # the next request tries again
        return seen

    def probe(self) -> dict[str, str]:
        """Return the versions of software and NVIDIA's driver, and the names of GPUs; ''
        if absent.

        Software is what a new process finds: setup may have made the folder that pip
        installs a user's packages into, which this one, begun before, does not search.
        """
        asked = [sys.executable, "-c", _FIND_SOFTWARE]
        found = subprocess.run(asked, cwd="/", stdout=subprocess.PIPE, check=True)
        software: dict[str, str] = json.loads(found.stdout)
        nccl = {name: version for name in _NCCL if (version := software.pop(name))}
        cuda = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", software.pop("build"), re.MULTILINE)
        return {
            "system": platform.system(),
            "machine": platform.machine(),
            "python": ".".join(map(str, sys.version_info[:2])),
            **software,
            "cuda": cuda[1] if cuda else "",
            "nccl": next(iter(nccl.values()), ""),
            "nccl_package": next(iter(nccl), ""),
            "driver": _driver(),
            "gpu": gpu_names(),
        }

    def start(
        self,
        vm_id: str,
        package: str,
        agent: dict[str, Any],
        environment: dict[str, str],
    ) -> None:
        """Start the VM's agent, detached, unless it runs.

        One of another package is ended first, with all processes of the VM.
        """
        with self._locked():
            claim = self._claim_of(vm_id)
            if self._state(claim) == "running":
                if claim.get("package") == package:
                    return
                self._kill(vm_id)
            folder = self._root / vm_id
            _write_private(folder / "agent.json", json.dumps(agent).encode())
            given = self._environment(vm_id, environment, package)
            self._spawn_keeper(folder, given)
            self._write_claim({**claim, "started": True, "package": package})

    def _spawn_keeper(self, folder: Path, environment: dict[str, str]) -> None:
        with (folder / "agent.log").open("ab") as log:
            keeper = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "spottrain.cloud.ssh.on_vm.keeper",
                    str(folder),
                ],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        timer = threading.Timer(_KEEPER_S, keeper.kill)
        timer.start()
        try:
            if not keeper.stdout.read(1):
                raise RefusedError(f"agent did not start: {_tail(folder / 'agent.log', 300)}")
        finally:
            timer.cancel()
            keeper.stdout.close()

    def _environment(self, vm_id: str, given: dict[str, str], package: str = "") -> dict[str, str]:
        """Return the environment of a VM's processes, with our package if given."""
        ours = os.path.dirname(sys.executable)
        path = f"{ours}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        marker = {"SPOTTRAIN_VM": vm_id, "OMP_NUM_THREADS": "1"}
        found = {**os.environ, "PATH": path, **given, **marker}
        if package:
            paths = [str(self._root / package), found.get("PYTHONPATH")]
            found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return found


def serve(requests: BinaryIO, answers: BinaryIO, root: Path, agent: Any = None) -> None:
    """Answer requests until the connection ends.

    Args:
        requests: A line of JSON each; with ``bytes`` an archive of that size follows.
        answers: A line of JSON each, in any order.
        root: Folder for archives, and of the host agent.
        agent: Has the operations; None: a host agent.

    Each renews the lease of a rented VM, for it comes from the manager; the agent, which
    does so later, starts after setup and data, and these may take longer than the lease.
    """
    agent, write_lock = agent or HostAgent(root), threading.Lock()

    def reply(answer: dict[str, Any]) -> None:
        with write_lock:
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()

    def handle(number: int, operation: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            reply({"id": number, "ok": operation(**arguments)})
        except RefusedError as error:
            reply({"id": number, "error": str(error)})
        except BrokenPipeError:
            pass  # the connection has ended
        except Exception as error:  # noqa: BLE001 - sent to the caller
            reply({"id": number, "error": f"{type(error).__name__}: {error}"})

    reply({"id": 0, "ok": hello(root)})
    for line in requests:
        arguments = json.loads(line)
        renew_lease()
        number, name = arguments.pop("id"), arguments.pop("op")
        if "bytes" in arguments:
            arguments["archive"] = _receive(requests, root, arguments.pop("bytes"), number)
        threading.Thread(
            target=handle, args=(number, getattr(agent, name), arguments), daemon=True
        ).start()


def _installing(folder: Path, pins: Sequence[str], cache: bool) -> dict[str, str]:
    """Return variables that tell pip and uv what to install, and pip where it keeps it.

    Args:
        folder: Of the VM.
        pins: Requirements that bind.
        cache: Keep what pip downloads.
    """
    found: dict[str, str] = {}
    if pins:
        bound = folder / "constraints.txt"
        bound.write_text("".join(f"{pin}\n" for pin in pins))
        found |= {name: str(bound) for name in ("PIP_CONSTRAINT", "UV_CONSTRAINT")}
    if cache:
        found["PIP_CACHE_DIR"] = str(folder / _PIP_CACHE)
    return found


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit code of a process, None if it takes longer than a limit."""
    end_s = time.monotonic() + limit_s
    while (left_s := end_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left_s, _RENEW_S))
        renew_lease()
    return None


def _plain_members(tar: tarfile.TarFile, folder: Path) -> list[tarfile.TarInfo]:
    """Return the members of an archive, if none leads out of a folder.

    Raises:
        TarError: one does, or is neither a file, a folder nor a link.
    """
    folder = folder.resolve()
    members = tar.getmembers()
    for member in members:
        target = folder / member.name
        link = target.parent / member.linkname if member.issym() else target
        inside = all(x.resolve().is_relative_to(folder) for x in (target, link))
        if not inside or not (member.isreg() or member.isdir() or member.issym()):
            raise tarfile.TarError(f"{member.name!r} is no plain file of the folder")
    return members


def renew_lease() -> None:
    """Renew a VM's lease, as ``cloud.port.lease.renew``; do nothing if there is none.

    At boot its time lies ahead, for the agent to be started in: it is not put back.
    """
    with contextlib.suppress(OSError):
        if LEASE_FILE.stat().st_mtime < time.time():
            os.utime(LEASE_FILE)


def is_given_up() -> bool:
    """Return whether a VM has a lease and is about to end: ``cloud.port.lease.give_up``."""
    held = LEASE_FILE.is_file() and LEASE_FILE.stat().st_size == 0
    return LEASE_FILE.parent.is_dir() and not held


def hello(root: Path) -> dict[str, str]:
    """Return the host's address; exit if the host is unsuitable."""
    if platform.system() != "Linux":
        raise SystemExit(f"unfit: runs {platform.system()}, needs Linux")
    if not os.access(root.parent, os.W_OK):
        raise SystemExit(f"unfit: {root.parent} cannot be written to")
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {"address": connection[2] if len(connection) == 4 else ""}


def _receive(requests: BinaryIO, root: Path, size: int, number: int) -> Path:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = root / f"arriving-{os.getpid()}-{number}"
    with path.open("wb") as file:
        while size > 0:
            chunk = requests.read(min(size, 1 << 18))
            if not chunk:
                raise SystemExit(0)
            file.write(chunk)
            size -= len(chunk)
    return path


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _started_at(pid: int) -> str:
    """Return a process's start time in kernel ticks; '' if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[19]


def _tail(path: Path, limit: int = _LOG_BYTES) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - limit))
        return file.read().decode(errors="replace")


def gpu_names(driver: Path = Path("/proc/driver/nvidia")) -> str:
    """Return the names of the GPUs, each once, as NVIDIA's driver has them.

    A line of each GPU's file is like ``Model:  NVIDIA A100-SXM4-40GB`` (README of the
    driver, "proc Filesystem").
    """
    names = set()
    for file in driver.glob("gpus/*/information"):
        with contextlib.suppress(OSError):
            names.update(re.findall(r"^Model:\s*(\S.*?)\s*$", file.read_text(), re.MULTILINE))
    return " and ".join(sorted(names))


def _driver() -> str:
    """Return the version of NVIDIA's driver, if its kernel module is loaded.

    The first line of its file ends like ``x86_64  580.95.05  Release Build  (...)``.
    """
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    return found[1] if found else ""


def _write_private(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(data)
    draft.replace(path)
