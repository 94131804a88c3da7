"""A memory holder in this process, for tests of what lies in it."""

from __future__ import annotations

import os


class LocalHolder:
    """Anonymous files, as the supervisor holds them."""

    def __init__(self) -> None:
        self.pieces: dict[str, int] = {}

    def open(self, name: str, num_bytes: int) -> int:
        if name not in self.pieces:
            self.pieces[name] = os.memfd_create(name)
        if os.fstat(self.pieces[name]).st_size < num_bytes:
            os.ftruncate(self.pieces[name], num_bytes)
        return os.dup(self.pieces[name])

    def names(self) -> frozenset[str]:
        return frozenset(self.pieces)

    def release(self, name: str) -> None:
        os.close(self.pieces.pop(name))

    def close(self) -> None:
        for name in list(self.pieces):
            self.release(name)
