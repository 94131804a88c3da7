"""Buckets of S3, GCS and Azure through obstore: one compiled wheel serves all three.

obstore is imported when a store is made. It starts threads: a process that forks must
not open one before. Credentials are found as the clouds' own tools find them: the
environment, then, where boto3 or azure-identity is installed, the profiles and logins
they know, then the role of the machine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from spottrain.aws_login import open_session
from spottrain.errors import one_line
from spottrain.storage import store

PART_BYTES = 8 << 20
"""Least size of the parts that a large file is sent in."""
MAX_PARTS = 9_000
"""S3 takes 10,000 parts a file."""
PAGE_KEYS = 1_000
_CREDENTIALS_LAST = timedelta(minutes=15)
_READ_TIMEOUT = timedelta(minutes=2)
_REQUEST_TIMEOUT = timedelta(hours=6)
PROFILES = ("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
"""Variables that tell where the profiles of the AWS tools are."""
_S3_URL = "https://s3.amazonaws.com"
_REGION_S = 10.0
_AZURE_SCOPE = "https://storage.azure.com/.default"

Credentials = Callable[[], dict[str, Any]]


def open_objects(place: store.StoreUrl, patience_s: float) -> ObjectStore:
    """Return the store at ``place``.

    Args:
        place: From ``storage.parse_url``.
        patience_s: How long a request without an answer is tried again.

    Raises:
        StorageError: obstore is not installed, or refuses the settings.
    """
    url = f"{place.scheme}://{place.bucket}/{place.prefix}".rstrip("/")
    try:
        importlib.import_module("obstore")
    except ImportError as error:
        raise store.StorageError(f"{url} needs obstore: run pip install obstore") from error
    endpoint = place.options.get("endpoint_url") or _endpoint(place.scheme)
    common = {
        "prefix": place.prefix or None,
        "client_options": {
            "allow_http": endpoint.startswith("http://"),
            "read_timeout": _READ_TIMEOUT,
            "timeout": _REQUEST_TIMEOUT,
        },
        "retry_config": {"retry_timeout": timedelta(seconds=patience_s)},
    }
    make = {"s3": _open_s3, "gs": _open_gs, "az": _open_az}[place.scheme]
    with _translating_errors(url, "open"):
        return ObjectStore(make(place, endpoint, common), url)


def _endpoint(scheme: str) -> str:
    if scheme != "s3":
        return ""
    env = os.environ
    return env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL", "")


def _open_s3(place: store.StoreUrl, endpoint: str, settings: dict[str, Any]) -> Any:
    from obstore.store import S3Store

    region = place.options.get("region")
    if "AWS_ACCESS_KEY_ID" not in os.environ and _has_login("~/.aws", PROFILES):
        credentials, profile_region = _boto3_credentials()
        settings["credential_provider"] = credentials
        named = {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ)
        region = region or (None if named else profile_region)
    named = {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ)
    if not region and not named and not endpoint:  # a VM: nothing here knows it
        region = bucket_region(place.bucket)
    if region:
        settings["region"] = region
    if endpoint:
        settings["endpoint"] = endpoint
    return S3Store(place.bucket, **settings)


def bucket_region(bucket: str, endpoint: str = "") -> str:
    """Return the region of an S3 bucket, empty if S3 does not say.

    S3 names it to everybody in the header ``x-amz-bucket-region``, of redirects and
    refusals too ("HeadBucket" in its API reference).

    Args:
        endpoint: URL of another service than Amazon's.
    """
    url = f"{endpoint or _S3_URL}/{bucket}"
    request = urllib.request.Request(url, method="HEAD")
    try:
        with _WITHOUT_REDIRECTS.open(request, timeout=_REGION_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except OSError:
        return ""
    return str(headers.get("x-amz-bucket-region", ""))


class _Refuse(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nothing: the redirect itself names the region."""


_WITHOUT_REDIRECTS = urllib.request.build_opener(_Refuse)


def _open_gs(place: store.StoreUrl, endpoint: str, settings: dict[str, Any]) -> Any:
    from obstore.store import GCSStore

    if endpoint:
        settings["base_url"] = endpoint
    return GCSStore(place.bucket, **settings)


def _open_az(place: store.StoreUrl, endpoint: str, settings: dict[str, Any]) -> Any:
    from obstore.store import AzureStore

    default = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    account = place.options.get("account") or default
    if not account:
        raise store.StorageError(
            f"az://{place.bucket} needs the name of its storage account: add "
            "?account=<name>, or set AZURE_STORAGE_ACCOUNT_NAME"
        )
    if endpoint:
        settings["endpoint"] = endpoint
    secrets = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY")
    has_secret = any(name in os.environ for name in secrets)
    if not has_secret and _has_login("~/.azure"):
        settings["credential_provider"] = _azure_credentials()
    return AzureStore(place.bucket, account_name=account, **settings)


def _has_login(folder: str, variables: Iterable[str] = ()) -> bool:
    """Return whether the cloud's own tool was set up here; VMs have roles instead."""
    named = any(name in os.environ for name in variables)
    return named or Path(folder).expanduser().is_dir()


def _boto3_credentials() -> tuple[Credentials | None, str | None]:
    """Return a provider of boto3's credentials, and its profile's region, if any."""
    try:
        from botocore.exceptions import BotoCoreError

        session = open_session()
        found = session.get_credentials()
    except ImportError:
        return None, None
    except BotoCoreError as error:
        reason = one_line(error)
        raise store.DeniedError(
            f"AWS's login cannot be read: {reason}; log in, or correct ~/.aws/config"
        ) from error
    if found is None:
        return None, session.region_name

    def give() -> dict[str, Any]:
        # A new session, as one keeps the keys of a profile that it has once read.
        found = open_session().get_credentials()
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,
        }

    return give, session.region_name


def _azure_credentials() -> Credentials | None:
    """Return a provider of azure-identity's tokens, if it is installed."""
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        return None
    login = DefaultAzureCredential()

    def give() -> dict[str, Any]:
        token = login.get_token(_AZURE_SCOPE)
        expires_at = datetime.fromtimestamp(token.expires_on, UTC)
        return {"token": token.token, "expires_at": expires_at}

    return give


class ObjectStore:
    """The objects below a prefix of a bucket.

    Files are up- and downloaded through the folder for temporary files (``TMPDIR``).

    Args:
        bucket: One of obstore's stores.
        place: Its URL.
    """

    def __init__(self, bucket: Any, place: str) -> None:
        import obstore

        self._obstore = obstore
        self._bucket = bucket
        self._place = place

    @property
    def place(self) -> str:
        """The URL, without options."""
        return self._place

    def put(self, name: str, source: Path | bytes) -> None:
        """See ``storage.Store``; a large file goes in parts, several at a time."""
        part_bytes = PART_BYTES
        if isinstance(source, Path):
            part_bytes = max(PART_BYTES, source.stat().st_size // MAX_PARTS)
        with _translating_errors(f"{self.place}/{name}", "write"):
            self._obstore.put(self._bucket, name, source, chunk_size=part_bytes)

    def put_new(self, name: str, data: bytes) -> None:
        """See ``storage.Store``."""
        with _translating_errors(f"{self.place}/{name}", "write"):
            self._obstore.put(self._bucket, name, data, mode="create")

    def get(self, name: str) -> bytes:
        """See ``storage.Store``."""
        with _translating_errors(f"{self.place}/{name}", "read"):
            return bytes(self._obstore.get(self._bucket, name).bytes())

    def fetch(self, name: str, target: Path) -> None:
        """See ``storage.Store``."""
        with store.unfinished(target) as part:
            self._download(name, part)
            os.replace(part, target)

    def list(self, prefix: str = "") -> store.Entries:
        """See ``storage.Store``; one request per thousand names."""
        return [store.StoreEntry(x.name, x.num_bytes) for x in self.versions(prefix)]

    def versions(self, prefix: str = "") -> Sequence[store.Version]:
        """Return the objects below a folder as ``list`` does, with their ETags."""
        with _translating_errors(f"{self.place}/{prefix}", "list"):
            below = prefix or None
            pages = self._obstore.list(self._bucket, below, chunk_size=PAGE_KEYS)
            return sorted(_version(x) for page in pages for x in page)

    def version(self, name: str) -> store.Version:
        """Return one object with its ETag.

        Raises:
            MissingError: There is none.
        """
        with _translating_errors(f"{self.place}/{name}", "read"):
            return _version(self._obstore.head(self._bucket, name))

    def folders(self) -> store.Names:
        """See ``storage.Store``."""
        with _translating_errors(self.place, "list"):
            found = self._obstore.list_with_delimiter(self._bucket)
            return sorted(found["common_prefixes"])

    def delete(self, names: Iterable[str]) -> None:
        """See ``storage.Store``."""
        chosen = tuple(names)
        try:
            with _translating_errors(self.place, "delete from"):
                self._obstore.delete(self._bucket, chosen)
        except store.MissingError:
            # Some clouds fail if one object is missing, and keep the others.
            if len(chosen) > 1:
                for name in chosen:
                    self.delete([name])

    def delete_folder(self, prefix: str) -> None:
        """See ``storage.Store``."""
        self.delete(entry.name for entry in self.list(prefix))

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """See ``storage.Store``."""
        with contextlib.suppress(store.MissingError):
            with _translating_errors(f"{self.place}/{name}", "read"):
                self._obstore.head(self._bucket, name)
            raise store.ExistsError(f"{self.place}/{name} exists: use a new name")
        place = f"{self.place}/{name}"
        with _translating_errors(place, "write"), _temporary_file(name) as path:
            yield path
            self.put(name, path)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """See ``storage.Store``."""
        with contextlib.ExitStack() as stack:
            with _translating_errors(f"{self.place}/{name}", "read"):
                path = stack.enter_context(_temporary_file(name))
            self._download(name, path)
            yield path

    def _download(self, name: str, target: Path) -> None:
        with _translating_errors(f"{self.place}/{name}", "read"):
            found = self._obstore.get(self._bucket, name)
            with open(target, "xb") as stream:
                stream.writelines(found.stream(min_chunk_size=PART_BYTES))


@contextlib.contextmanager
def _temporary_file(name: str) -> Iterator[Path]:
    """Yield a temporary local path, removed after the block."""
    with tempfile.TemporaryDirectory(prefix="spottrain-") as folder:
        yield Path(folder, name.rpartition("/")[2])


def _version(found: Any) -> store.Version:
    return store.Version(found["path"], found["size"], found["e_tag"] or "")


@contextlib.contextmanager
def _translating_errors(place: str, verb: str) -> Iterator[None]:
    """Translate obstore's errors."""
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

    try:
        yield
    except (AlreadyExistsError, PreconditionError) as error:
        raise store.ExistsError(f"{place} exists: use a new name") from error
    except FileNotFoundError as error:
        raise _missing(place, verb, str(error)) from error
    except BaseError as error:
        reason = _reason(place, error)
        denied = reason.startswith(_DENIED)
        kind = store.DeniedError if denied else store.UnreachableError
        raise kind(f"cannot {verb} {place}: {reason}") from error
    except OSError as error:  # of this machine, such as a full disk
        reason = error.strerror or str(error)
        raise store.UnreachableError(f"cannot {verb} {place}: {reason}") from error


_METADATA = ("169.254.169.254", "computeMetadata", "169.254.170.2", "/latest/api/token")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_REFUSED = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "401 ")
_DENIED = (
    "no credentials",
    "credentials refused",
    "no permission",
    "no such bucket",
    "the bucket is",
)
"""Beginnings of the reasons that a person must fix."""
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT_KEY",
    "az": "AZURE_STORAGE_ACCOUNT_KEY",
}


def _missing(place: str, verb: str, text: str) -> store.StorageError:
    if verb == "write" or any(sign in text for sign in _NO_BUCKET):
        return store.DeniedError(f"cannot {verb} {place}: no such bucket: create it first")
    return store.MissingError(f"cannot {verb} {place}: there is no such object")


def _reason(place: str, error: Exception) -> str:
    """Return the reason of obstore's error, and what to do, as one line."""
    variables = _VARIABLES[place.partition("://")[0]]
    login = f"set {variables}, log in with the cloud's tool, or give the machine a role"
    text = str(error).partition("\n\nDebug source")[0]
    code = re.search(r"<Code>(\w+)", text) or re.search(r"\b(\d{3} [A-Z][\w ]+)", text)
    said = code[1] if code else ""
    unknown = re.search("redential|Missing.*Key", text)
    if unknown or any(sign in text for sign in _METADATA):
        return f"no credentials found: {login}"
    if any(sign in text for sign in _NO_BUCKET):
        return "no such bucket: create it first"
    if any(sign in text for sign in _REFUSED):
        return f"credentials refused ({said}): renew them; {login}"
    if "403 " in text:
        return f"no permission ({said}): grant list, read, write and delete there"
    if "redirect" in text:
        bucket = place.partition("://")[2].partition("/")[0]
        region = bucket_region(bucket, _endpoint("s3"))
        return (
            f"the bucket is in {region or 'another region'}: add ?region={region or '<its region>'}"
        )
    if said:
        return f"the store answered {said}"
    if "HTTP error" in text:
        return "no answer: check the network, and ?endpoint_url= if it is given"
    return one_line(text)
