from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import costly

from spottrain.errors import UserCodeError
from spottrain.pipeline.loader.encoding import UnsendableError
from spottrain.pipeline.loader.prefetch import Prefetcher
from spottrain.pipeline.loader.process import serve_batches
from spottrain.pipeline.model.data import Microbatch, make_batch
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.order import example_index
from spottrain.wire.model import LoaderSpec

SEED = 3


class Examples:
    """Examples drawn at random; a few are bad, as the folder's files say."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.folder is not None:
            if (self.folder / f"raise-{index}").exists():
                raise ValueError(f"example {index} is bad")
            if (self.folder / f"die-{index}").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            if (once := self.folder / f"die-once-{index}").exists():
                once.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            sys.stdout.write(f"example {index}\n")
            with open(self.folder / "made", "a") as file:
                file.write(f"{index}\n")
        return index + torch.rand(3)


def a_job(folder: Path | None = None, **changes: Any) -> TrainingJob:
    job = TrainingJob(
        model=lambda: torch.nn.Linear(1, 1),
        dataset=Examples(folder),
        heldout={"near": Examples(folder)},
        loss=lambda model, batch: (torch.zeros(()), 1.0),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    return dataclasses.replace(job, **changes)


class Supervisor:
    """Forks loaders as the supervisor of a VM does."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.pids: list[int] = []

    def open_loader(self, number: int, requests: Sequence[dict[str, object]] = ()) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for request in requests:  # that it finds when it begins
            ours.sendall(json.dumps(request).encode())
        if (pid := os.fork()) == 0:
            try:
                ours.close()
                serve_batches(theirs, lambda: self.job, SEED)
            finally:
                os._exit(0)
        theirs.close()
        self.pids.append(pid)
        return ours

    def reap(self) -> None:
        for pid in self.pids:
            os.waitpid(pid, 0)


@pytest.fixture
def started() -> Iterator[list[tuple[Prefetcher, Supervisor]]]:
    everything: list[tuple[Prefetcher, Supervisor]] = []
    yield everything
    for prefetcher, supervisor in everything:
        prefetcher.close()
        supervisor.reap()


def start(
    everything: list[tuple[Prefetcher, Supervisor]],
    job: TrainingJob,
    workers: int | None = 2,
    ahead: int = 3,
) -> tuple[Prefetcher, Supervisor]:
    supervisor = Supervisor(job)
    spec = LoaderSpec(workers=workers, ahead=ahead)
    prefetcher = Prefetcher(job, SEED, spec, supervisor.open_loader)
    everything.append((prefetcher, supervisor))
    return prefetcher, supervisor


def training(number: int, step: int = 0, size: int = 2) -> Microbatch:
    return Microbatch(number * size, size, step, 8)


def mark(folder: Path, what: str, name: Microbatch) -> None:
    """Let something happen to the examples of a micro-batch."""
    first = name.step * name.minibatch_size + name.first
    for position in range(first, first + name.size):
        (folder / f"{what}-{example_index(SEED, range(40), position)}").touch()


NAMES = st.builds(
    Microbatch,
    first=st.integers(0, 9),
    size=st.integers(1, 3),
    step=st.integers(0, 3),
    minibatch_size=st.just(8),
    heldout=st.sampled_from([None, "near"]),
)


@costly
@given(
    asked=st.lists(st.tuples(NAMES, st.lists(NAMES, max_size=5)), max_size=12),
    workers=st.integers(0, 3),
    ahead=st.integers(3, 5),
    kills=st.sets(st.integers(0, 11)),
)
def test_batches_are_the_same_whoever_makes_them(
    asked: list[tuple[Microbatch, list[Microbatch]]],
    workers: int,
    ahead: int,
    kills: set[int],
) -> None:
    job, everything = a_job(), list[tuple[Prefetcher, Supervisor]]()
    prefetcher, supervisor = start(everything, job, workers, ahead)
    for turn, (name, following) in enumerate(asked):
        if turn in kills and supervisor.pids:
            os.kill(supervisor.pids[-1], signal.SIGKILL)
        batch = prefetcher.fetch(name, following)
        assert torch.equal(batch, make_batch(job, SEED, name))
    prefetcher.close()
    supervisor.reap()


def test_no_more_is_made_than_may_be_ahead(
    started: list[tuple[Prefetcher, Supervisor]], tmp_path: Path
) -> None:
    prefetcher, supervisor = start(started, a_job(tmp_path), workers=1, ahead=3)
    following = (training(number) for number in range(1, 100))
    prefetcher.fetch(training(0, size=1), following)
    prefetcher.fetch(training(3), ())  # the last of those that were made ahead

    made = (tmp_path / "made").read_text().split()

    assert len(made) == 1 + 3 * 2
    assert next(following) == training(4)
    assert len(supervisor.pids) == 1


def test_prints_of_a_loader_name_the_rank_that_it_works_for(
    started: list[tuple[Prefetcher, Supervisor]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prefetcher, _ = start(started, a_job(tmp_path), 1, 0)
    prefetcher.label = "rank 2"
    prefetcher.fetch(training(0))
    prefetcher.label = "rank 0"
    prefetcher.fetch(training(1))
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition("example")[0] for line in lines] == [
        *(["[rank 2] "] * 2),
        *(["[rank 0] "] * 2),
    ]


def test_what_is_not_wanted_any_more_is_not_made(tmp_path: Path) -> None:
    supervisor = Supervisor(a_job(tmp_path))
    requests: list[dict[str, object]] = [
        {"make": number, "name": training(number), "for": ""} for number in (1, 2, 3)
    ]
    with supervisor.open_loader(0, [*requests, {"drop": 2}]) as loader:
        made = []
        for _ in range(2):
            data, fds, _, _ = socket.recv_fds(loader, 1 << 16, 1)
            made.append(json.loads(data)["made"])
            os.close(*fds)
    supervisor.reap()

    assert made == [1, 3]
    assert len((tmp_path / "made").read_text().split()) == 2 * 2


def test_errors_of_the_data_set_are_as_in_the_worker_and_only_when_asked_for(
    started: list[tuple[Prefetcher, Supervisor]], tmp_path: Path
) -> None:
    job = a_job(tmp_path)
    prefetcher, _ = start(started, job)
    mark(tmp_path, "raise", training(1))
    assert len(prefetcher.fetch(training(0), [training(1), training(2)])) == 2
    assert len(prefetcher.fetch(training(2))) == 2
    with pytest.raises(UserCodeError) as here:
        make_batch(job, SEED, training(1))

    with pytest.raises(UserCodeError) as there:
        prefetcher.fetch(training(1))

    assert str(there.value) == str(here.value)
    assert "dataset in mini-batch 0 raised ValueError: example" in str(there.value)
    assert "in __getitem__" in there.value.traceback
    (tmp_path / "raise-0").touch()
    with pytest.raises(UserCodeError, match="evaluation raised ValueError"):
        prefetcher.fetch(Microbatch(0, 2, heldout="near"))


def test_a_loader_that_dies_is_replaced(
    started: list[tuple[Prefetcher, Supervisor]], tmp_path: Path
) -> None:
    job = a_job(tmp_path)
    prefetcher, supervisor = start(started, job)
    mark(tmp_path, "die-once", training(2))  # twice: it has two examples
    names = [training(number) for number in range(5)]

    batches = [prefetcher.fetch(n, names[number + 1 :]) for number, n in enumerate(names)]

    for name, batch in zip(names, batches, strict=True):
        assert torch.equal(batch, make_batch(a_job(), SEED, name))
    assert len(supervisor.pids) == 2 + 2


def test_a_loader_that_dies_of_an_example_is_not_replaced_for_ever(
    started: list[tuple[Prefetcher, Supervisor]], tmp_path: Path
) -> None:
    prefetcher, supervisor = start(started, a_job(tmp_path))
    mark(tmp_path, "die", training(0, step=5))

    with pytest.raises(
        UserCodeError, match="dataset in mini-batch 5 ended its loader process 3 times"
    ):
        prefetcher.fetch(training(0, step=5))

    assert len(supervisor.pids) == 2 + 3


def test_batches_that_cannot_be_sent_are_told(
    started: list[tuple[Prefetcher, Supervisor]],
) -> None:
    job = a_job(collate=lambda examples: lambda: examples)
    prefetcher, _ = start(started, job)
    with pytest.raises(UnsendableError, match=r"set loader\.workers: 0"):
        prefetcher.fetch(training(0))


def test_loaders_are_started_when_examples_take_noticeable_time(
    started: list[tuple[Prefetcher, Supervisor]],
) -> None:
    prefetcher, supervisor = start(started, a_job(), workers=None, ahead=3)
    numbers = []
    for step in range(8):
        prefetcher.fetch(training(0, step), [training(0, step + 1)])
        prefetcher.adapt(minibatch_s=1e9)
        numbers.append(prefetcher.num_loaders)
    assert numbers[-1] == 0  # of so long a mini-batch it is next to nothing
    slow = a_job(collate=Slow())
    prefetcher, supervisor = start(started, slow, workers=None, ahead=3)
    numbers = []
    for step in range(8):
        prefetcher.fetch(training(0, step), [])
        prefetcher.adapt(minibatch_s=0.1)
        numbers.append(prefetcher.num_loaders)

    assert numbers == [1, 1, 2, 2, 3, 3, 3, 3]
    assert len(supervisor.pids) == 3


class Slow:
    def __call__(self, examples: list[torch.Tensor]) -> torch.Tensor:
        signal.sigtimedwait([signal.SIGUSR2], 0.02)
        return torch.stack(examples)


def test_batches_that_cannot_be_sent_are_made_by_the_worker_if_nobody_asked_for_loaders(
    started: list[tuple[Prefetcher, Supervisor]],
) -> None:
    def collate(examples: list[torch.Tensor]) -> Any:
        Slow()(examples)
        return lambda: examples

    prefetcher, supervisor = start(started, a_job(collate=collate), workers=None)
    prefetcher.fetch(training(0))
    prefetcher.adapt(minibatch_s=0.0)
    assert prefetcher.num_loaders == 1

    assert len(prefetcher.fetch(training(1))()) == 2

    prefetcher.adapt(minibatch_s=0.0)
    prefetcher.adapt(minibatch_s=0.0)
    assert (prefetcher.num_loaders, len(supervisor.pids)) == (0, 1)
