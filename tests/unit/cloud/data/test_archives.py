"""Archives: unpacked as they were packed, or told."""

from __future__ import annotations

import contextlib
import io
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.cloud.data.cache import unpack
from spottrain.cloud.data.request import DataError, DataRequest

WISH = DataRequest(name="images", url="s3://bucket/images.tar", unpack=True)
CONTENT = {
    "below/a.bin": Random(0).randbytes(3000),
    "below/b.txt": b"hello " * 500,
    "c": b"",
}


@cache
def packed(kind: str) -> bytes:
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, data in CONTENT.items():
                zipped.writestr(name, data)
    else:
        with tarfile.open(None, f"w:{kind}", file) as tar:  # type: ignore[call-overload]
            for name, data in CONTENT.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def unpacked(data: bytes) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        archive, folder = Path(place, "archive"), Path(place, "folder")
        archive.write_bytes(data)
        folder.mkdir()
        unpack(WISH, archive, folder)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("kind", ["", "gz", "bz2", "xz", "zip"])
def test_an_archive_is_unpacked(kind: str) -> None:
    assert unpacked(packed(kind)) == CONTENT


@given(st.sampled_from(["gz", "bz2", "xz"]), st.integers(0))
def test_a_flipped_bit_is_detected_or_harmless(kind: str, bit: int) -> None:
    data = packed(kind)
    found = CONTENT
    with contextlib.suppress(DataError):
        found = unpacked(flipped(data, bit % (8 * len(data))))
    assert found == CONTENT


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zip"])
def test_a_flipped_bit_in_the_content_is_detected(kind: str) -> None:
    with pytest.raises(DataError, match="archive"):
        unpacked(flipped(packed(kind), 8 * 1500))


def test_a_damaged_header_of_a_later_file_is_detected() -> None:
    at = packed("").index(b"below/b.txt")
    with pytest.raises(DataError, match="cannot be unpacked: bad checksum; fix"):
        unpacked(flipped(packed(""), 8 * at))


def test_a_zip_with_a_password_is_an_error() -> None:
    data = bytearray(packed("zip"))
    for mark, flags_at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(mark) + flags_at] |= 1
    with pytest.raises(DataError, match="is encrypted, password required"):
        unpacked(bytes(data))


def test_a_name_that_is_file_and_folder_is_not_reported_as_damage() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("a", b"1")
        zipped.writestr("a/b", b"2")
    with pytest.raises(OSError, match="a"):
        unpacked(file.getvalue())
