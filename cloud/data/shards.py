"""A data set of examples in files that come when they are needed, for user code."""

from __future__ import annotations

import bisect
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from spottrain.cloud.data.request import DataError
from spottrain.cloud.data.stream import LENGTHS, Stream
from spottrain.datasets import data_path


class Indexed(Protocol):
    """What gives examples by index."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one."""


class Shards:
    """A map-style data set whose examples lie in files of the job file's data.

    The files are fetched when they are needed, those of the next window ahead, and machines
    keep at most the data's ``cache_gib`` of them. Examples are shuffled within ``window``
    files that are drawn for each epoch, so that not every mini-batch needs every file: a
    larger window mixes better and takes more room, twice its files.

    Args:
        name: Of the data in the job file; it has ``cache_gib``.
        read: Called with the path of a file; returns its examples by index. What it opens
            must stay readable when the file is deleted, as an open file or a memory map is.
        lengths: The number of examples of each file, by name, or called with a file's
            size in bytes; by default what ``lengths.json`` beside the files says. Other
            files are left out.
        window: How many files are read together.

    Raises:
        DataError: The data is not streamed, a file is missing, or what ``lengths`` says of
            one is no number of examples.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[Path], Indexed],
        lengths: Mapping[str, int] | Callable[[int], int] | None = None,
        *,
        window: int = 8,
    ) -> None:
        self._stream = Stream(data_path(name))
        self._read, self.window = read, window
        files = self._stream.files
        if lengths is None:
            lengths = self._lengths()
        if callable(lengths):
            lengths = {file: lengths(files[file].num_bytes) for file in files}
        self._names = sorted(file for file in lengths if lengths[file])
        for file in self._names:
            if file not in files:
                raise DataError(f"{self._stream.request.what}: has no {file}, which has a length")
        if window < 1 or not self._names or min(lengths.values()) < 0:
            raise DataError(
                f"{self._stream.request.what}: needs a window of at least one file, and lengths "
                f"that are numbers of examples: got {window} of {len(self._names)} files"
            )
        self.shard_lengths = tuple(lengths[name] for name in self._names)
        self._ends = list(accumulate(self.shard_lengths))
        self._open: OrderedDict[int, Indexed] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be below {len(self)}: got {index}")
        index %= len(self)
        shard = bisect.bisect_right(self._ends, index)
        return self._examples(shard)[index - self._ends[shard] + self.shard_lengths[shard]]

    def expect(self, shards: Sequence[int], current: Sequence[int]) -> None:
        """Begin to fetch the files that are read next, beside those that are read now."""
        self._stream.expect([self._names[x] for x in shards], [self._names[x] for x in current])

    def _examples(self, shard: int) -> Indexed:
        """Return what a file holds; the last few that were read stay open."""
        while shard not in self._open:
            path = self._stream.path(self._names[shard], [self._names[x] for x in self._open])
            try:
                self._open[shard] = self._read(path)
            except FileNotFoundError:
                continue  # another process made room with it meanwhile
            if len(self._open) > self.window:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]

    def _lengths(self) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads((self._stream.folder / LENGTHS).read_text())
        except FileNotFoundError as error:
            raise DataError(
                f"{self._stream.request.what}: has no {LENGTHS}; put one beside the files, as "
                '{"NAME": NUMBER OF EXAMPLES, …}, or give lengths'
            ) from error
        return found
