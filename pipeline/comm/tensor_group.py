"""Sums and gathers of the ranks that divide the matrices of a stage replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from spottrain.activity import Activity
from spottrain.pipeline.comm.groups import GenerationBrokenError
from spottrain.pipeline.devices.port import Device


class TensorGroup:
    """This rank among those that divide the matrices of its stage, all in one VM.

    All of them come to the same collectives in the same order, between their computations.

    Args:
        ranks: Of the group, in order.
        rank: This one.
        device: What it computes on.
        on_host: Gloo's group of the ranks.
        on_device: That of their devices, if they have one.
        activity: Where it tells that it waits.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        device: Device,
        on_host: dist.ProcessGroup,
        on_device: dist.ProcessGroup | None,
        activity: Activity,
    ) -> None:
        self.size, self.index = len(ranks), ranks.index(rank)
        self._device, self._activity = device, activity
        self._on_host = on_host
        self._on_device = on_host if device.is_host else on_device

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place, to the same bits at all of them.

        Raises:
            GenerationBrokenError: A peer is gone.
        """
        device = self._device
        with self._meeting():
            if self._on_device is not None:
                dist.all_reduce(tensor, group=self._on_device)
                return
            part = device.finish(device.download(tensor))
            dist.all_reduce(part, group=self._on_host)
            device.wait(device.upload(part, tensor))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks one after the other.

        Args:
            part: This rank's: contiguous, of one dimension, as large as all others'.

        Raises:
            GenerationBrokenError: A peer is gone.
        """
        device, own = self._device, part.view(torch.uint8)  # gloo does not know all types
        size = len(own) * self.size
        with self._meeting():
            if self._on_device is not None:
                whole = own.new_empty(size)
                dist.all_gather(list(whole.chunk(self.size)), own, group=self._on_device)
            else:
                whole = device.allocate_host((size,), torch.uint8)
                own = device.finish(device.download(own))
                dist.all_gather(list(whole.chunk(self.size)), own, group=self._on_host)
                whole = device.wait(device.upload(whole))
        return whole.view(part.dtype)

    def sum_parts(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum of tensors of all ranks.

        Args:
            whole: This rank's: contiguous, of one dimension, that many parts one after the other.

        Raises:
            GenerationBrokenError: A peer is gone.
        """
        device = self._device
        with self._meeting():
            if self._on_device is not None and not device.is_host:
                part = whole.new_empty(len(whole) // self.size)
                dist.reduce_scatter(part, list(whole.chunk(self.size)), group=self._on_device)
                return part
            # Gloo's own way sends and adds up all of it at every rank.
            own = device.finish(device.download(whole)).view(torch.uint8)
            parts = torch.empty_like(own)
            dist.all_to_all_single(parts, own, group=self._on_host)
            total = device.allocate_host((len(whole) // self.size,), whole.dtype)
            torch.sum(parts.view(whole.dtype).view(self.size, -1), 0, out=total)
            return device.wait(device.upload(total))

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        try:
            with self._activity.waiting():
                yield
        except RuntimeError as error:
            raise GenerationBrokenError(f"a peer is gone: {error}") from error
