"""The user's entrypoint is loaded, or refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spottrain.errors import CapacityError, UserCodeError
from spottrain.pipeline.model.entrypoint import load_job, user_code
from spottrain.pipeline.model.job import TrainingJob

GOOD = """
import torch
from spottrain import Callbacks, TrainingJob
from {name}_parts import DATA

def job(**changes):
    parts = dict(model=torch.nn.Identity, dataset=DATA, loss=print, optimizer=print)
    return TrainingJob(**(parts | changes))

def built():
    return job(model=torch.nn.Linear(1, 1))

def optimizer():
    return job(optimizer=torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))

def schedule():
    return job(lr_schedule=0.1)

def norm():
    return job(clip_grad_norm=-1.0)

def words():
    return job(clip_grad_norm="1.0")

def calls():
    return job(callbacks={{}})

def call():
    return job(callbacks=Callbacks(on_best=3))

def no_time():
    return job(callbacks=Callbacks(limit_s=0))

def heldout():
    return job(heldout={{"books/old": DATA}})

def raises():
    raise ValueError("no such file:\\nsecond line")

def leaves():
    raise SystemExit(4)

def wrong():
    return 42

number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Write a user's module with a name of its own into tmp_path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"user_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(GOOD.format(name=name))
    (tmp_path / f"{name}_parts.py").write_text("DATA = [1, 2, 3]\n")
    return name


def test_a_job_is_loaded_from_the_workdir_and_its_neighbours(module: str, tmp_path: Path) -> None:
    job = load_job(f"{module}:job", tmp_path)
    assert isinstance(job, TrainingJob)
    assert len(job.dataset) == 3
    assert sys.path[0] == str(tmp_path)


def test_a_workdir_loaded_twice_is_first_on_the_path_once(module: str, tmp_path: Path) -> None:
    load_job(f"{module}:job", tmp_path)
    sys.path.insert(0, "/elsewhere")
    load_job(f"{module}:job", tmp_path)
    assert sys.path[0] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("nothing", "entrypoint must be module:function: got 'nothing'"),
        (":job", "must be module:function"),
        ("{m}:", "must be module:function"),
        ("{m}_absent:job", "entrypoint module '.*_absent' not found: looked in"),
        ("{m}:absent", "entrypoint function 'absent' not found"),
        ("{m}:number", "entrypoint function 'number' not found"),
        ("{m}:raises", "raised ValueError: no such file:$"),
        ("{m}:leaves", "raised SystemExit: 4$"),
        ("{m}:built", r"built already; .* model=lambda: Linear\(...\)$"),
        (
            "{m}:optimizer",
            r"optimizer must be a function: got a SGD; .*torch.optim.AdamW",
        ),
        ("{m}:schedule", r"lr_schedule must be a function: got a float"),
        ("{m}:norm", r"clip_grad_norm must be a number above zero, .* got -1.0$"),
        ("{m}:calls", r"callbacks must be spottrain.Callbacks: got a dict; write"),
        ("{m}:call", r"callbacks.on_best must be a function: got a int; write"),
        ("{m}:no_time", r"callbacks.limit_s must be a number of seconds above zero: got 0$"),
        ("{m}:words", r"clip_grad_norm must be a number above zero, .* got '1.0'$"),
        ("{m}:heldout", r"must have a name without '/': got 'books/old'"),
        ("{m}:wrong", r"must return a spottrain.TrainingJob: got int"),
    ],
)
def test_a_bad_entrypoint_is_refused_in_one_line(
    module: str, tmp_path: Path, entrypoint: str, message: str
) -> None:
    with pytest.raises(UserCodeError, match=message) as caught:
        load_job(entrypoint.format(m=module), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import absent_library_of_the_user", "raised ModuleNotFoundError: No module"),
        ("def broken(:", "raised SyntaxError"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_module_that_cannot_be_imported_gives_the_users_traceback(
    module: str, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(UserCodeError, match=message) as caught:
        load_job(f"{module}:job", tmp_path)
    assert f"{module}.py" in caught.value.traceback


def test_our_own_errors_pass_through_user_code_as_they_are() -> None:
    with pytest.raises(CapacityError, match="none left"), user_code("loss"):
        raise CapacityError("none left")


def test_an_interrupt_passes_through_user_code() -> None:
    with pytest.raises(KeyboardInterrupt), user_code("loss"):
        raise KeyboardInterrupt
