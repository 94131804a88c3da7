"""Training jobs that are defined in ``__main__``, on their way to VMs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import spottrain
from spottrain import pickled
from spottrain.errors import ConfigError, UserCodeError
from spottrain.varuna_manager.api.objects import pickled as as_bytes
from spottrain.varuna_manager.api.objects import work_folder
from spottrain.varuna_manager.launch.workdir import packed_files


class Lines:
    """A data set."""

    def __init__(self, **more: Any) -> None:
        self.__dict__.update(more)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def training_job(**parts: Any) -> spottrain.TrainingJob:
    usual: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "dataset": Lines(),
        "loss": lambda model, batch: (model(batch).sum(), 1.0),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
    }
    return spottrain.TrainingJob(**(usual | parts))


def with_lock() -> Callable[[int], float]:
    lock = threading.Lock()

    def schedule(step: int) -> float:
        with lock:
            return 1.0

    return schedule


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        ({"dataset": Lines(text=open(os.devnull))}, "dataset: text"),  # noqa: SIM115
        ({"dataset": Lines(files={"a": [threading.Lock()]})}, "dataset: files: ['a']: [0]"),
        ({"lr_schedule": with_lock()}, "lr_schedule: lock"),
        ({"loss": partial(lambda lock, model, batch: lock, threading.Lock())}, "loss"),
        ({"heldout": {"dev": Lines(lock=threading.Lock())}}, "heldout: ['dev']: lock"),
    ],
)
def test_what_cannot_be_pickled_is_named(parts: dict[str, Any], where: str) -> None:
    with pytest.raises(UserCodeError, match="cannot be sent to VMs") as refused:
        as_bytes(training_job(**parts))
    assert str(refused.value).startswith(where)


def test_a_work_folder_is_all_that_another_process_needs(tmp_path: Path) -> None:
    """Also below a folder of Git that ignores everything, as of a home with dotfiles in Git."""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*\n")
    mine = tmp_path / "mine"
    (mine / ".git").mkdir(parents=True)
    (mine / "notes.py").write_text("LR = 0.25\n")
    (mine / "secret.key").touch()
    (mine / "ignored.txt").touch()
    (mine / ".gitignore").write_text("*.txt\n")
    script = (
        "from pathlib import Path\n"
        "import notes, torch, spottrain\n"
        "from spottrain.varuna_manager.api.objects import work_folder\n"
        "class Model(torch.nn.Linear): pass\n"
        "job = spottrain.TrainingJob(model=lambda: Model(1, 1), dataset=[1, 2], loss=None,\n"
        "    optimizer=None, lr_schedule=lambda step: notes.LR)\n"
        f"with work_folder(job, Path({str(mine)!r}), print) as folder:\n"
        "    import shutil; shutil.copytree(folder, 'sent')\n"
    )
    there = tmp_path / "there"
    there.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(mine), *sys.path])}
    subprocess.run([sys.executable, "-c", script], cwd=there, env=environment, check=True)
    sent = {path.parts[0] for path in packed_files(there / "sent")}
    assert sent == {pickled.FILE, "cloudpickle", "notes.py", ".spottrainignore"}
    read = (
        f"import sys; sys.path.insert(0, {str(there / 'sent')!r})\n"
        "from spottrain.pickled import training_job\n"
        "job = training_job()\n"
        "print(type(job.model()).__name__, job.lr_schedule(0), list(job.dataset))\n"
    )
    done = subprocess.run([sys.executable, "-c", read], stdout=-1, text=True, check=True)
    assert done.stdout == "Model 0.25 [1, 2]\n"
    assert not list((tmp_path / "home" / "cache" / "objects").iterdir())


def test_a_module_that_did_not_come_along_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_behind.py").write_text("def loss(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    loss = __import__("left_behind").loss
    made = f"{pickled.python_version()}\n".encode() + cloudpickle.dumps(loss)
    monkeypatch.delitem(sys.modules, "left_behind")
    (tmp_path / "left_behind.py").unlink()
    (tmp_path / pickled.FILE).write_bytes(made)
    with pytest.raises(UserCodeError, match=r"the module left_behind,.*workdir=FOLDER"):
        pickled.training_job()


def test_functions_of_another_python_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / pickled.FILE).write_bytes(b"2.7\n" + cloudpickle.dumps(len))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserCodeError, match=r"pickled by Python 2\.7"):
        pickled.training_job()


def test_the_folder_goes_with_the_block() -> None:
    with work_folder(training_job(), None, print) as folder:
        assert (folder / pickled.FILE).exists()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "launch: .*: is missing; add it"),
        (
            {"name": "x", "steps": 1, "minibatch_size": 4, "provider": "asw"},
            "resources.provider: must be local",
        ),
        ({"entrypoint": "a:b"}, "entrypoint: is for job files"),
        (
            {"name": "x", "steps": 1, "minibatch_size": 4, "workdir": Path("/nowhere")},
            "launch: workdir: is not a folder: got /nowhere",
        ),
    ],
)
def test_settings_of_an_object_are_checked_as_those_of_a_file(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spottrain.launch(training_job(), **settings)
    assert not (tmp_path / "home").exists(), "nothing was written"
