"""A package index on loopback, as PEP 503 describes it, at a rate of its own."""

from __future__ import annotations

import os
import time
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copyfileobj
from threading import Thread
from typing import Any, Self

_CHUNK_BYTES = 1 << 18


class PackageIndex:
    """An index that notes what is downloaded.

    Args:
        folder: Of its files.
        bytes_per_s: Rate of each download.
    """

    def __init__(self, folder: Path, bytes_per_s: float = float("inf")) -> None:
        self._folder = folder
        self._server = _Server(folder, bytes_per_s)
        host, port = self._server.server_address[:2]
        self.environment = {
            "PIP_INDEX_URL": f"http://{host!s}:{port}/simple",
            # pip keeps nothing from plain HTTP otherwise.
            "PIP_TRUSTED_HOST": str(host),
        }
        """For those who install from it."""

    def add(self, project: str, version: str, num_bytes: int = 0) -> None:
        """Add a wheel, with so many bytes that cannot be compressed."""
        files, pages = self._folder / "files", self._folder / "simple"
        page = pages / project.replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        files.mkdir(exist_ok=True)
        name = f"{project}-{version}-py3-none-any.whl"
        info = f"{project}-{version}.dist-info"
        texts = {
            f"{project}.py": f"VERSION = {version!r}\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        data = f"{project}.bin"
        record = "".join(f"{one},,\n" for one in (*texts, data, f"{info}/RECORD"))
        with zipfile.ZipFile(files / name, "w") as archive:
            for one, text in {**texts, f"{info}/RECORD": record}.items():
                archive.writestr(one, text)
            archive.writestr(data, os.urandom(num_bytes))
        with page.open("a") as file:
            file.write(f'<a href="../../files/{name}">{name}</a>\n')

    def downloads(self) -> list[str]:
        """Return the files that were downloaded."""
        return [
            path.removeprefix("/files/")
            for path in self._server.asked
            if path.startswith("/files/")
        ]

    def forget(self) -> None:
        """Forget what was downloaded."""
        self._server.asked.clear()

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Serve, directory=str(folder)))
        self.bytes_per_s = bytes_per_s
        self.asked: list[str] = []


class _Serve(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        self.server.asked.append(self.path)
        super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        assert isinstance(self.server, _Server)
        if self.server.bytes_per_s == float("inf"):
            copyfileobj(source, outputfile)
            return
        while chunk := source.read(_CHUNK_BYTES):
            outputfile.write(chunk)
            time.sleep(len(chunk) / self.server.bytes_per_s)

    def end_headers(self) -> None:
        # As files.pythonhosted.org says of its files: pip keeps them so long.
        self.send_header("cache-control", "max-age=365000000, immutable, public")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""
