"""The key pair with which a job's manager enters the VMs that it rents."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from spottrain.cloud.ssh.transport.host_keys import new_host_key


def ensure_key(folder: Path) -> tuple[Path, str]:
    """Return a job's private key file and its public half; made on the first call.

    Args:
        folder: Of the job's cloud; the private key never leaves it.

    Returns:
        The file, and ``type base64 comment`` as in an authorized_keys file.
    """
    path = folder / "ssh_key"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_once(path, new_host_key()[0].encode())
    key = serialization.load_ssh_private_key(path.read_bytes(), None)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return path, f"{public.decode()} spottrain"


def _write_once(path: Path, data: bytes) -> None:
    """Write a whole file unless somebody was faster."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(data)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # theirs is the job's key
    finally:
        draft.unlink()
