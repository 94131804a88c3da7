"""The Hugging Face Hub, as far as repositories are read.

Rules, each asked of this fake by the real ``huggingface_hub`` in the tests, too:
https://huggingface.co/docs/hub/api (revision, tree, resolve), and what that client reads of
answers (its ``utils/_http.py`` and ``file_download.py``): ``X-Error-Code``,
``X-Error-Message``, ``X-Repo-Commit``, ``X-Linked-Size``, ``X-Linked-ETag``, ``Link``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.fakes.http_server import Handler, Server, running
from tests.fakes.web import Web, serve_web

TOKEN = "hf_of_somebody"
PAGE = 3
"""Entries of a page; the Hub's have up to a thousand."""
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/]+)(?:/(.*))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Its commits; ``branches`` point at some of them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    access: str = "public"
    """Or ``private``, which nobody else sees, or ``gated``: to be asked for."""

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Put files into a new commit; return its name."""
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name


class Hub(Server):
    """Serves repositories; large files (``*.bin``) from another server, as the real one."""

    def __init__(self, content: Web) -> None:
        super().__init__(("127.0.0.1", 0), _Hub)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.content = content
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.asked: list[str] = []

    def repository(self, name: str, kind: str = "models") -> Repository:
        """Return a repository, made where it is missing."""
        return self.repositories.setdefault((kind, name), Repository())


class _Hub(Handler):
    server: Hub

    def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer; that to HEAD has the length of the content."""
        if self.command != "HEAD":
            return super().send(status, body, headers)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        return self.end_headers()

    def answer(self) -> None:
        """Answer a GET, or a HEAD, which is the same without its body."""
        hub = self.server
        hub.asked.append(self.path)
        asked = urlsplit(self.path)
        if found := _API.fullmatch(asked.path):
            kind, name, what, revision, path = found.groups()
        elif found := _FILE.fullmatch(asked.path):
            kind = "datasets" if found[1] else "models"
            name, what, revision, path = found[2], "resolve", found[3], found[4]
        else:
            return self._refuse(404, "", "Not Found")
        repository = hub.repositories.get((kind, name))
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.access == "private" and not is_known):
            # Nobody learns which private repositories there are.
            if is_known:
                return self._refuse(404, "RepoNotFound", "Repository not found")
            return self._refuse(401, "RepoNotFound", "Invalid username or password.")
        if repository.access == "gated" and what == "resolve" and not is_known:
            said = f"Access to {kind[:-1]} {name} is restricted. Please log in."
            return self._refuse(403 if "Authorization" in self.headers else 401, "GatedRepo", said)
        revision = unquote(revision)
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        path = unquote(path or "")
        if what == "revision":
            return self._json({"id": name, "sha": commit, "siblings": []})
        if what == "tree":
            return self._tree(files, path, parse_qs(asked.query), asked.path)
        if path not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._file(files[path], path, commit)

    do_GET = do_HEAD = answer  # noqa: N815

    def _tree(
        self, files: dict[str, bytes], folder: str, query: dict[str, list[str]], url: str
    ) -> None:
        prefix = f"{folder}/" if folder else ""
        inside = {x: y for x, y in files.items() if x.startswith(prefix)}
        if not inside:
            return self._refuse(404, "EntryNotFound", f'"{folder}" does not exist')
        entries: dict[str, dict[str, Any]] = {}
        recursive = query.get("recursive", ["false"])[0].lower() == "true"
        for path, content in sorted(inside.items()):
            *above, _ = path.removeprefix(prefix).split("/")
            for depth in range(len(above)):
                name = prefix + "/".join(above[: depth + 1])
                tree = {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
                if recursive or depth == 0:
                    entries.setdefault(name, tree)
            if above and not recursive:
                continue
            oid = hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
            entry = {"type": "file", "oid": oid, "size": len(content), "path": path}
            if path.endswith(".bin"):
                large = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": large, "size": len(content), "pointerSize": 134}
            entries[path] = entry
        first = int(query.get("cursor", ["0"])[0])
        headers = {}
        if first + PAGE < len(entries):
            flag = str(recursive).lower()
            following = f"{self.server.url}{quote(url)}?recursive={flag}&cursor={first + PAGE}"
            headers["Link"] = f'<{following}>; rel="next"'
        return self._json(list(entries.values())[first : first + PAGE], headers)

    def _file(self, content: bytes, path: str, commit: str) -> None:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if not path.endswith(".bin"):
            return self.send(200, content, headers)
        name = f"/{hashlib.sha256(content).hexdigest()}"
        self.server.content.files[name] = content
        headers |= {
            "Location": self.server.content.url + name,
            "X-Linked-Size": str(len(content)),
            "X-Linked-ETag": f'"{name[1:]}"',
        }
        return self.send(302, b"", headers)

    def _json(self, what: Any, headers: dict[str, str] | None = None) -> None:
        self.send(200, json.dumps(what).encode(), headers or {})

    def _refuse(self, status: int, code: str, said: str) -> None:
        headers = {"X-Error-Message": said} | ({"X-Error-Code": code} if code else {})
        self.send(status, b"{}", headers)


@contextlib.contextmanager
def serve_hub() -> Iterator[Hub]:
    """Run the Hub and the server of its large files on loopback."""
    with serve_web() as content, running(Hub(content)) as hub:
        yield hub
