"""Serves archives of one VM to the job's other VMs of its region.

Runs in the host agent and ends with it; standard library only. It listens only at the
VM's private address. A URL has a secret in it, which only the manager tells; who fetches
knows the digest from the manager, so content cannot be forged.
"""

from __future__ import annotations

import http.server
import secrets
import threading
from pathlib import Path

from spottrain.cloud.ssh.on_vm.relay import listen

_CHUNK_BYTES = 1 << 18
_SILENT_S = 30.0
"""A reader that takes nothing for so long is left."""


class Share:
    """Serves until its process ends.

    Args:
        address: Private address of this VM.

    Raises:
        ValueError: the address is public.
        OSError: the address is not this machine's, or all ports are taken.
    """

    def __init__(self, address: str) -> None:
        self._server = _Server(address)
        threading.Thread(target=self._server.serve_forever, name="share", daemon=True).start()

    def url_of(self, path: Path) -> str:
        """Return the URL at which a file is served from now on."""
        with self._server.lock:
            for secret, known in self._server.files.items():
                if known == path:
                    return self._server.url + secret
            secret = secrets.token_urlsafe(32)
            self._server.files[secret] = path
            return self._server.url + secret


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, address: str) -> None:
        listener = listen(address)
        host, port = listener.getsockname()
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.url = f"http://{host}:{port}/"
        self.files: dict[str, Path] = {}
        self.lock = threading.Lock()


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _SILENT_S

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        path = self.server.files.get(self.path.removeprefix("/"))
        if path is None or not path.is_file():
            self.send_error(404)
            return
        with path.open("rb") as file:
            self.send_response(200)
            self.send_header("content-length", str(path.stat().st_size))
            self.end_headers()
            while chunk := file.read(_CHUNK_BYTES):
                self.wfile.write(chunk)

    def log_message(self, *_: object) -> None:
        """Say nothing: the answers of the host agent are on stdout."""
