"""The section of a job file about the data for its VMs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import BeforeValidator, Field, model_validator

from spottrain.cloud.data.request import WEB_SCHEMES, DataRequest, HubUrl
from spottrain.storage.store import OBJECT_SCHEMES, StorageError, parse_url
from spottrain.varuna_manager.config.base import LocalPath, Section, below
from spottrain.varuna_manager.config.clouds import OWN_MACHINES

_SCHEMES = (*OBJECT_SCHEMES, "hf", "https", "http", "file")
_WEB_URL = re.compile(r"[!-~]+")
_SECRET = re.compile(
    r"x-(amz|goog)-.*|(.*[-_.])?(sig|signature|secret|pass(word|wd|phrase)?)\d*|.*token"
    r"|.*(api|access)[-_]?key(-?id)?",
    re.IGNORECASE,
)
"""Names of query parameters and mount options whose values are credentials."""


class DataConfig(Section):
    """One dataset: a URL, a path, or a file system to mount."""

    url: str | None = None
    """An object, or a prefix that ends in `/`: `s3://`, `gs://`, `az://`, `https://`,
    or `http://` with `sha256`. `hf://owner/model` and `hf://datasets/owner/name` are
    repositories of the Hugging Face Hub, with `@revision` and `/path` where wanted.
    Fetched once per machine. `file:///…` is a path."""
    files: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Which files of a folder are fetched, such as `["*.safetensors", "*.json"]`; by
    default all. `*` stands for slashes, too."""
    path: str | None = None
    """A file or folder that the machines already have; not for machines of a cloud."""
    mount: str | None = None
    """The source of a file system to mount, such as
    `fs-0123.efs.us-east-1.amazonaws.com:/`; mounting needs root or `sudo` without a
    password. Not for the local provider."""
    type: str = ""
    """Type of the file system, such as `nfs4`."""
    options: str = ""
    """Mount options, such as `ro,nconnect=8`."""
    cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Files of the folder are fetched when `spottrain.Shards` needs them, and each machine
    keeps at most so many GiB of them, those used last; by default all are fetched first."""
    unpack: bool = False
    """The URL is a tar or zip archive that is unpacked for your code."""
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the object in hexadecimal; it is verified."""
    sample: LocalPath | None = None
    """A path on this machine to use instead while the model is inspected here; relative
    to the job file."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        given = [x for x in ("url", "path", "mount") if getattr(self, x) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of url, path and mount: got {', '.join(given) or 'none'}")
        if self.mount is None and (self.type or self.options):
            raise ValueError("type and options need mount")
        if self.mount is not None:
            _check_mount(self.mount, self.type, self.options)
        if self.files and not self._is_folder:
            raise ValueError("files needs a url that is a folder")
        if self.cache_gib is not None and not self._is_folder:
            raise ValueError("cache_gib needs a url that is a folder")
        if self.unpack and not self.is_fetched:
            raise ValueError("unpack needs a url that is fetched")
        if self.sha256 and not self.is_fetched:
            raise ValueError("sha256 needs a url that is fetched")
        if self.url is not None:
            self._check_url(self.url)
        return self

    def _check_url(self, url: str) -> None:
        parts = urlsplit(url)
        _check_secrets(parts)  # first: further errors show the URL
        if parts.scheme not in _SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
            raise ValueError(f"url must begin with {known}: got {url}")
        if parts.scheme in WEB_SCHEMES and not _WEB_URL.fullmatch(url):
            raise ValueError(
                f"url must be ASCII without blanks, with escapes such as %C3%A9: got {url!r}"
            )
        if parts.scheme == "file":
            if parts.netloc or not parts.path.startswith("/"):
                raise ValueError(f"url must be file:///path: got {url}")
            return
        is_folder = self._is_folder
        path = unquote(parts.path)
        if {".", ".."} & set(path.split("/")) or "\0" in path:
            raise ValueError(f"url must not contain . or .. or %00: got {url!r}")
        if not parts.netloc:
            raise ValueError(f"url must name a bucket or server: got {url}")
        if parts.scheme == "http" and not self.sha256:
            raise ValueError("http:// needs sha256: nothing else verifies the data")
        if parts.scheme in OBJECT_SCHEMES:
            try:
                parse_url(url)
            except StorageError as error:
                raise ValueError(str(error)) from error
        if parts.scheme == "hf":
            HubUrl.parse(url)
        if is_folder and (self.unpack or self.sha256 or parts.scheme in WEB_SCHEMES):
            raise ValueError(f"url must name one object here and not end with /: got {url}")

    @property
    def _is_folder(self) -> bool:
        """True if it is a prefix of a bucket, a repository, or a folder of one."""
        if self.url is None:
            return False
        if self.url.startswith("hf:"):
            return HubUrl.parse(self.url).is_folder
        path = urlsplit(self.url).path
        return path.endswith("/") or not path

    @property
    def is_fetched(self) -> bool:
        """True if machines fetch it."""
        return self.url is not None and not self.url.startswith("file:")

    @property
    def local_path(self) -> str | None:
        """Its path, if it is one."""
        if self.url is not None and not self.is_fetched:
            return urlsplit(self.url).path
        return self.path

    def to_request(self, name: str) -> DataRequest:
        """Return it as a request to the machines."""
        return DataRequest(
            name=name,
            url=self.url if self.is_fetched and self.url else "",
            path=self.local_path or "",
            mount=self.mount or "",
            unpack=self.unpack,
            sha256=self.sha256,
            type=self.type,
            options=self.options,
            files=self.files,
            cache_bytes=int((self.cache_gib or 0) * 2**30),
        )


def _check_secrets(parts: SplitResult) -> None:
    """Refuse a URL with credentials; the error names them but does not show them."""
    found = [name for name, _ in parse_qsl(parts.query) if _SECRET.fullmatch(name)]
    names_account = parts.scheme in ("abfs", "abfss") and parts.password is None
    if parts.username is not None and not names_account:
        found.append("a password")
    if found:
        raise ValueError(
            f"url must not hold a password or signature, got {found[0]}: URLs appear in "
            "logs; use s3://, gs:// or az:// for buckets: VMs take "
            "credentials from secrets: or from their role"
        )


def _check_mount(source: str, kind: str, options: str) -> None:
    found = [name for x in options.split(",") if _SECRET.fullmatch(name := x.split("=")[0])]
    if found or (":" in source.partition("://")[2].rpartition("@")[0]):
        raise ValueError(
            f"mount must not hold a password, got {(*found, 'one in its source')[0]}: it "
            "would appear in logs and process lists; keep it in a file of the image "
            "that an option names, such as credentials=/etc/share"
        )
    if not kind:
        raise ValueError("mount needs type, such as nfs4")
    for what, text in (("mount", source), ("type", kind), ("options", options)):
        if re.search(r"\s", text) or text.startswith("-"):
            raise ValueError(f"{what} must be one word: got {text!r}")


def _short(data: Any) -> Any:
    return {"url": data} if isinstance(data, str) else data


DataName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
"""Name of a dataset in the user's code."""
AnyData = Annotated[DataConfig, BeforeValidator(_short)]
"""A dataset; a string is short for its URL."""


Data = dict[DataName, AnyData]
"""All datasets of a job, by name."""


def absolute_data(
    data: Mapping[str, DataConfig], base: Path, providers: Sequence[str]
) -> dict[str, DataConfig]:
    """Return datasets, whose paths are relative to the job file if its VMs are here."""
    if "local" not in providers:
        return dict(data)
    return {
        name: one
        if one.path is None
        else one.model_copy(update={"path": str(below(base, one.path))})
        for name, one in data.items()
    }


def check_data(data: Mapping[str, DataConfig], providers: Sequence[str]) -> None:
    """Check datasets against a job's providers.

    Raises:
        ValueError: One does not fit.
    """
    provider = ", ".join(providers)
    for name, one in data.items():
        where = f"data.{name}"
        if provider == "local" and one.mount is not None:
            raise ValueError(
                f"{where}: the local provider cannot mount, its VMs are this machine; "
                "mount it yourself and give its path"
            )
        path = one.local_path
        if path is not None and provider not in ("local", *OWN_MACHINES):
            raise ValueError(f"{where}: VMs of {provider} do not have {path}; give a url or mount")
        if path is not None and provider in OWN_MACHINES and path[0] not in "/~":
            raise ValueError(f"{where}: path must be absolute on the hosts: got {path}")


def data_requests(data: Mapping[str, DataConfig]) -> tuple[DataRequest, ...]:
    """Return all datasets as requests to the machines."""
    return tuple(one.to_request(name) for name, one in data.items())
