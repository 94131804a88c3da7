"""SSH keys that we generate: host keys for VMs, and each job's login key."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization.ssh import SSHPrivateKeyTypes

from spottrain.cloud.port import tags


def new_host_key() -> tuple[str, str]:
    """Return (private, public) of a new key pair in OpenSSH's format."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    return private.decode(), _public(key)


def ensure_key(folder: Path) -> tuple[Path, str]:
    """Return a job's private key file and public key; created on the first call.

    Args:
        folder: The job's cloud folder; the private key leaves it only for that of a job
            which takes over a VM that lets it in.

    Returns:
        The file, and ``type base64 comment`` as in an authorized_keys file.
    """
    path = key_file(folder)
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_once(path, new_host_key()[0].encode())
    key = serialization.load_ssh_private_key(path.read_bytes(), None)
    return path, f"{_public(key)} spottrain"


def _public(key: SSHPrivateKeyTypes) -> str:
    """Return ``type base64`` of a private key's public one."""
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return public.decode()


def key_file(folder: Path, intent: str = "") -> Path:
    """Return the private key for a VM of a job.

    Args:
        folder: The job's cloud folder.
        intent: The VM's. One that came from another job lets that job's key in.
    """
    return folder / "keys" / intent if tags.order_of(intent) else folder / "ssh_key"


def copy_key(key: Path, copy: Path) -> None:
    """Copy the key for a VM to the job that gets it."""
    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not copy.exists():
        _write_once(copy, key.read_bytes())


def _write_once(path: Path, data: bytes) -> None:
    """Write a file atomically unless it exists."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(data)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # another process made the job's key
    finally:
        draft.unlink()
