"""The command line: answers, errors and exit codes."""

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.builders import model_facts, section_facts

from spottrain.varuna_manager.api.actions import ManagerGoneError
from spottrain.varuna_manager.cli.main import (
    COMMANDS,
    EXIT_CODES,
    SIMULATIONS,
    ConfigTools,
    PoolTools,
    first_line,
)
from spottrain.varuna_manager.cli.watch import Watcher
from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.core.model.events import StopRequested
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch import submit as submission
from tests.commands import Run

ROOT = Path(__file__).parents[4]
FACTS = model_facts(
    [section_facts(param_bytes=40, optimizer_bytes=80)],
    fingerprint="f",
    num_parameters=10,
)


def job_file(folder: Path, **changes: Any) -> Path:
    workdir = folder / "code"
    workdir.mkdir(exist_ok=True)
    (workdir / "train.py").write_text("def raises():\n    raise OSError('no data')\n")
    data = {
        "name": "demo",
        "entrypoint": "train:raises",
        "workdir": "code",
        "minibatch_size": 8,
        "steps": 5,
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps({**data, **changes}))
    return path


def submit(folder: Path) -> JobDir:
    job, _ = submission.submit(load_config(job_file(folder)), FACTS)
    return job


def test_vms_get_the_time_that_data_and_setup_may_take(tmp_path: Path) -> None:
    host = {"address": "127.0.0.1"}
    path = job_file(
        tmp_path,
        resources={"provider": "ssh"},
        checkpoint={"path": str(tmp_path)},
        ssh={"hosts": [host]},
        setup="true",
        data={"words": "s3://bucket/words"},
    )
    job = JobDir(tmp_path / "job")
    settings = submission.job_settings(load_config(path), FACTS, job, 0.0)
    assert settings.busy_s == 600.0 + 3600.0
    local = submission.job_settings(load_config(job_file(tmp_path)), FACTS, job, 0.0)
    assert local.busy_s == 0.0


def end(job: JobDir) -> None:
    """Let a job that never rented anything end: a person stops it."""
    with contextlib.closing(Journal(job.journal)) as journal:
        journal.record(StopRequested(at_s=time.time(), by="a test", now=True))


def test_help_lists_commands_and_exit_codes(run: Run) -> None:
    text = " ".join(run("--help").out.split())
    commands = "launch plan status logs events report stop resume down inspect config"
    for command in [*commands.split(), "calibrate"]:
        assert f" {command} " in text
    assert " ".join(EXIT_CODES.split()) in text


def test_the_readme_lists_the_same_exit_codes() -> None:
    readme = (ROOT / "README.md").read_text()
    for part in EXIT_CODES.removeprefix("Exit codes: ").rstrip(".").split(", "):
        code, meaning = part.split(" ", 1)
        assert f"| {code} | {meaning} |" in readme


def test_help_imports_no_command() -> None:
    script = (
        "import sys; from spottrain.varuna_manager.cli import main\n"
        "for arguments in (['--help'], ['pool', '--help'], ['simulate', '--help']):\n"
        "    main.app(arguments, standalone_mode=False)\n"
        "places = (place.partition(':')[0] for place in main.COMMANDS.values())\n"
        "assert not sys.modules.keys() & {*places}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    assert "Start a job and watch it." in done.stdout


@pytest.mark.parametrize("places", [COMMANDS, PoolTools.places, ConfigTools.places, SIMULATIONS])
def test_a_command_says_the_same_of_itself_in_every_help(places: Mapping[str, str]) -> None:
    for place in places.values():
        module, function = place.split(":")
        loaded = getattr(importlib.import_module(module), function)
        assert loaded.__doc__.splitlines()[0] == first_line(module, function)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["lauch"], "launch"), (["pool", "stauts"], "status"), (["simulate", "pol"], "pool")],
)
def test_a_misspelt_command_is_told_the_nearest(run: Run, arguments: list[str], meant: str) -> None:
    answer = run(*arguments)
    assert answer.code == 2
    assert answer.error == f"error: No such command {arguments[-1]!r}; did you mean {meant}?"


@pytest.mark.parametrize(
    "arguments", [["lauch"], ["status", "--nope"], ["launch"], ["status", "--watch"]]
)
def test_wrong_usage_exits_with_2(run: Run, arguments: list[str]) -> None:
    answer = run(*arguments)
    assert answer.code == 2
    assert answer.out == ""


def test_the_schema_is_one_json_document(run: Run) -> None:
    assert "minibatch_size" in json.loads(run("config", "schema").out)["properties"]


def test_options_of_a_launch_are_checked_as_the_file_is(run: Run, tmp_path: Path) -> None:
    path = job_file(tmp_path)
    answer = run("launch", path, "--set", "budgets.max_usd=1")
    assert answer.code == 2
    assert "job.yaml: budgets: unknown key; did you mean budget?" in answer.error
    answer = run("launch", path, "--name", "no_name", "--steps", "3", "--env", "A=1")
    assert "job.yaml: name: must be" in answer.error
    answer = run("launch", path, "--set", "budget.max_usd=1e-9")
    assert (answer.code, "less than one step costs" in answer.error) == (4, True)


def test_errors_show_what_was_given_as_it_was(run: Run, tmp_path: Path) -> None:
    assert "unknown key" in run("launch", job_file(tmp_path), "--set", "x:a:=1").error
    assert "x:a:" in run("launch", job_file(tmp_path), "--set", "x:a:=1").error


MISSPELT: dict[str, Any] = {"budgets": {}}
POOR = {"budget": {"max_usd": 1e-9}}


@pytest.mark.parametrize(
    ("command", "change", "code", "message"),
    [
        ("launch", MISSPELT, 2, "job.yaml: budgets: unknown key; did you mean budget?"),
        ("plan", MISSPELT, 2, "job.yaml: budgets: unknown key"),
        ("launch --dry-run", MISSPELT, 2, "job.yaml: budgets: unknown key"),
        ("launch", {"entrypoint": "train:nothing"}, 3, "nothing"),
        ("launch", POOR, 4, "less than one step costs"),
        ("plan", POOR, 4, "less than one step costs"),
    ],
)
def test_a_wrong_job_file_starts_nothing(
    run: Run,
    tmp_path: Path,
    command: str,
    change: dict[str, Any],
    code: int,
    message: str,
) -> None:
    answer = run(*command.split(), job_file(tmp_path, **change), "-o", "json")
    assert answer.code == code
    assert answer.out == ""
    assert message in answer.error
    assert not list((tmp_path / "home" / "jobs").glob("*"))


ELSEWHERE: dict[str, Any] = {
    "resources": {"provider": "ssh"},
    "checkpoint": {"path": "saved"},
    "ssh": {"hosts": [{"address": "nobody.invalid"}]},
}


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"secrets": ["NOBODY_SETS_THIS"]}, 2, "secrets: NOBODY_SETS_THIS is not set"),
        ({"track": {"mlflow": {"tracking_uri": "x"}}}, 2, "track.mlflow: the package"),
        ({"notify": {"command": ["no-such-program"]}}, 2, "no program no-such-program"),
        (
            {"notify": {"webhook": "$NOBODY_SETS_THIS"}},
            2,
            "notify.webhook: the environ",
        ),
        ({"checkpoint": {"path": "/proc/nowhere"}}, 2, "checkpoint.path: cannot write"),
        (ELSEWHERE, 5, "nobody.invalid"),
        (POOR, 4, "less than one step costs"),
        ({"workdir": "ignored"}, 2, "entrypoint: train.py is not sent"),
    ],
)
def test_a_dry_run_fails_as_the_launch_would(
    run: Run, tmp_path: Path, change: dict[str, Any], code: int, message: str
) -> None:
    ignored = tmp_path / "ignored"
    ignored.mkdir()
    (ignored / "train.py").touch()
    (ignored / ".gitignore").write_text("*.py\n")
    path = job_file(tmp_path, **change)
    answers = [run("launch", path, *dry) for dry in ((), ("--dry-run",))]
    answers.append(run("plan", path))
    assert [answer.code for answer in answers] == [code] * 3
    assert all(message in answer.error for answer in answers)
    found = run("doctor", path)
    assert found.code == 6
    assert f"FAIL {'ssh' if change is ELSEWHERE else 'here'} " in found.out
    assert message in found.out


@pytest.mark.rotated
def test_a_dry_run_refuses_a_name_in_use_and_a_plan_does_not(run: Run, tmp_path: Path) -> None:
    submit(tmp_path)
    path = tmp_path / "job.yaml"
    assert run("launch", path).error == run("launch", path, "--dry-run").error
    assert "name: a job demo can be resumed" in run("launch", path, "--dry-run").error
    assert run("plan", path).code == 3  # its code raises


@pytest.mark.rotated
def test_what_is_sent_is_told_by_launch_dry_run_and_plan(run: Run, tmp_path: Path) -> None:
    path = job_file(tmp_path)
    (tmp_path / "code" / ".env").write_text("TOKEN=x")
    for command in (("launch",), ("launch", "--dry-run"), ("plan",)):
        told = run(*command, path).err
        assert "1 file, 43 B, go to each VM" in told
        assert "keys and tokens have such names: .env" in told


@pytest.mark.rotated
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_everything_is_no_error(tmp_path: Path, encoding: str) -> None:
    path = job_file(tmp_path)
    (tmp_path / "code" / "train.py").write_text(
        "def raises():\n    raise OSError('нет данных …')\n", encoding="utf-8"
    )
    (tmp_path / "code" / os.fsdecode(b"caf\xe9.bin")).write_bytes(b"\xff" * 2000)
    environment = {
        **os.environ,
        "SPOTTRAIN_HOME": str(tmp_path / "home"),
        "PYTHONIOENCODING": encoding,
    }
    done = subprocess.run(
        [sys.executable, "-m", "spottrain.varuna_manager.cli.main", "launch", path],
        check=False,
        capture_output=True,
        env=environment,
    )
    assert done.returncode == 3
    assert b"internal" not in done.stderr
    assert rb"\u043d\u0435\u0442" in done.stderr
    assert rb"caf\udce9.bin" in done.stderr


@pytest.mark.rotated
def test_output_of_the_users_code_need_not_be_text(run: Run, tmp_path: Path) -> None:
    path = job_file(tmp_path)
    (tmp_path / "code" / "train.py").write_text(
        "import os, sys\n"
        "def raises():\n"
        "    print('é …')\n"
        "    os.write(1, b'\\xff\\n'); os.write(2, b'\\xfe\\n')\n"
        "    os._exit(1)\n",
        encoding="utf-8",
    )
    answer = run("launch", path)
    assert answer.code == 1
    assert "internal" not in answer.error
    assert r"ended with 1: \xfe" in answer.error


def test_a_folder_whose_name_is_no_text_is_named(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    answer = run("launch", job_file(folder))
    assert answer.code == 2
    assert "the folder's name must be UTF-8" in answer.error


@pytest.mark.rotated
def test_the_traceback_of_user_code_is_shown(run: Run, tmp_path: Path) -> None:
    answer = run("launch", job_file(tmp_path))
    assert answer.code == 3
    assert "no data" in answer.error
    assert "raise OSError('no data')" in answer.err
    assert "varuna_manager" not in answer.err


@pytest.mark.rotated
def test_a_model_is_inspected_once_until_its_code_changes(run: Run, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    arguments = ("inspect", tmp_path / "examples" / "quickstart.yaml", "-o", "json")
    facts = json.loads(run(*arguments).out)
    assert len(facts["sections"]) >= 8
    (kept,) = (tmp_path / "home" / "cache" / "inspect").glob("*.json")
    kept.write_text(json.dumps({**facts, "blocks": "kept"}))
    assert json.loads(run(*arguments).out)["blocks"] == "kept"
    (tmp_path / "examples" / "new.py").write_text("")
    assert json.loads(run(*arguments).out) == facts


def test_no_capacity_exits_with_5(run: Run, tmp_path: Path) -> None:
    local = {"zones": [{"capacity": 1}]}
    path = job_file(tmp_path, resources={"min_vms": 2}, local=local)
    answer = run("plan", path)
    assert answer.code == 5
    assert "2 VMs wanted, 1 can be rented now" in answer.error


def test_a_cap_below_what_enough_machines_cost_exits_with_4(run: Run, tmp_path: Path) -> None:
    local = {"zones": [{"spot_usd_per_hour": 3.0}]}
    path = job_file(
        tmp_path,
        resources={"min_vms": 4, "max_vms": 4},
        budget={"max_usd_per_hour": 7},
        local=local,
    )
    for command in ("plan", "launch"):
        answer = run(command, path)
        assert answer.code == 4
        assert "budget.max_usd_per_hour: 7.0 does not pay for 4" in answer.error


def test_debug_shows_what_the_yaml_parser_said(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: [")
    told = run("launch", path)
    assert "caused by" not in told.err
    assert "Traceback" not in told.err
    debugged = run("--debug", "launch", path)
    assert (debugged.code, debugged.error) == (told.code, told.error)
    assert "\ncaused by: ruamel.yaml.parser.ParserError: while parsing" in debugged.err
    assert "\nTraceback (most recent call last):" in debugged.err


def test_debug_shows_what_sqlite_said_of_a_damaged_journal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "home" / "jobs" / "broken"
    path.mkdir(parents=True)
    (path / "journal.sqlite").write_bytes(b"no database, " * 100)
    answer = run("--debug", "report", "broken")
    assert answer.code == 1
    assert "journal is damaged" in answer.error
    cause = "caused by: sqlite3.DatabaseError: file is not a database"
    assert answer.err.splitlines()[1] == cause
    everything = run("--debug", "status")
    assert cause in everything.err.splitlines()


def has_a_bug() -> None:
    """A command."""
    raise ZeroDivisionError("by nothing")


def test_debug_shows_the_traceback_of_an_internal_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "broken", f"{__name__}:has_a_bug")
    told = run("broken")
    assert told.code == 1
    assert told.error.startswith("error: internal: ZeroDivisionError: by nothing")
    assert told.error.endswith("run it again with --debug and report it")
    debugged = run("--debug", "broken")
    assert debugged.code == 1
    assert "Traceback (most recent call last):" in debugged.err


def test_a_machine_without_jobs_has_an_empty_status(run: Run) -> None:
    assert json.loads(run("status", "-o", "json").out) == []
    answer = run("status")
    assert (answer.code, answer.out) == (0, "")
    assert "'spottrain launch job.yaml' starts one" in answer.err


@pytest.mark.parametrize(
    "command", ["status", "report", "events", "logs", "stop", "resume", "down"]
)
def test_an_unknown_job_exits_with_2(run: Run, command: str) -> None:
    answer = run(command, "nobody")
    assert (answer.code, answer.out) == (2, "")
    assert "no job nobody on this machine" in answer.error


def test_a_job_without_a_manager_can_be_inspected(run: Run, tmp_path: Path) -> None:
    job = submit(tmp_path)
    job.log.write_text("first\n\x1b]0;title\x07sec\x1b[31mond\nunfinis")
    status = json.loads(run("status", "demo", "-o", "json").out)
    assert (status["state"], status["steps"]) == ("unmanaged", 5)
    assert json.loads(run("report", "demo", "-o", "json").out)["steps_done"] == 0
    (event,) = json.loads(run("events", "demo", "-o", "json").out)
    assert event["kind"] == "JobSubmitted"
    assert "submitted" in run("events", "demo").out
    assert "demo  unmanaged" in run("status").out
    logs = run("logs", "demo").out
    lines = ("first", "second", "unfinis")
    assert logs == "".join(f"manager.log: {line}\n" for line in lines)


def test_stopping_a_job_without_a_manager_says_what_to_do(run: Run, tmp_path: Path) -> None:
    submit(tmp_path)
    answer = run("stop", "demo")
    assert answer.code == 2
    assert "'spottrain down demo'" in answer.error


def test_the_local_provider_says_that_it_needs_linux(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    answer = run("launch", job_file(tmp_path))
    assert answer.code == 2
    assert "resources.provider: local needs Linux" in answer.error


def test_a_name_in_use_is_refused_before_the_model_is_inspected(run: Run, tmp_path: Path) -> None:
    submit(tmp_path)
    answer = run("launch", job_file(tmp_path))
    assert answer.code == 2
    assert answer.error.startswith("error: name: ")


def test_down_ends_a_job_for_good(run: Run, tmp_path: Path) -> None:
    job = submit(tmp_path)
    assert run("down", "demo").code == 0
    assert run("down", "demo").code == 0
    status = json.loads(run("status", "demo", "-o", "json").out)
    assert (status["state"], status["fleet"]) == ("down", [])
    answer = run("resume", "demo")
    assert answer.code == 2
    assert "job demo has ended" in answer.error
    assert not job.is_managed()


@pytest.mark.parametrize(("typed", "code"), [("n\n", 1), ("y\n", 0)])
def test_down_asks_at_a_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, code: int
) -> None:
    submit(tmp_path)
    terminal = io.StringIO(typed)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    answer = run("down", "demo")
    assert answer.code == code
    assert "End job demo for good?" in answer.err
    assert run("down", "demo", "--yes").code == 0
    assert run("down", "demo").code == 0, "an ended job needs no answer"


def test_a_damaged_journal_is_one_line_and_down_still_works(run: Run, tmp_path: Path) -> None:
    job = submit(tmp_path)
    job.journal.write_bytes(b"not a journal " * 500)
    for command in (["status"], ["status", "demo"]):
        answer = run(*command)
        assert answer.code == 1
        assert "journal" in answer.error
    assert run("launch", job_file(tmp_path)).error.startswith("error: name: ")
    assert run("down", "demo").code == 0
    submission.check_name("demo")


def watcher_of(job: JobDir, **options: Any) -> tuple[Watcher, Console]:
    console = Console(record=True, width=120, quiet=True)
    return Watcher(job, console, **options), console


def test_the_watcher_ends_with_the_exit_code_of_the_job(run: Run, tmp_path: Path) -> None:
    job = submit(tmp_path)
    watcher, _ = watcher_of(job)
    end(job)
    assert watcher.run() == 130


def test_the_watcher_reports_that_the_manager_is_gone(run: Run, tmp_path: Path) -> None:
    job = submit(tmp_path)
    manager = subprocess.Popen([sys.executable, "-c", ""])
    watcher, _ = watcher_of(job, manager=manager)
    with pytest.raises(ManagerGoneError, match="'spottrain resume demo'"):
        watcher.run()
    assert manager.poll() == 0


class Impatient(io.StringIO):
    """A screen whose reader presses Ctrl-C at its first line and at two errors."""

    def __init__(self, job: JobDir, manager: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self.job = job
        self.manager = manager

    def refusals(self) -> int:
        """Return how many errors it showed."""
        return self.getvalue().count("error: ")

    def write(self, text: str) -> int:
        before = self.refusals()
        shown = super().write(text)
        if shown == len(self.getvalue()) or before < self.refusals() < 3:
            os.kill(os.getpid(), signal.SIGINT)
        elif before < self.refusals():
            end(self.job)
            self.manager.kill()
        return shown


def test_ctrl_c_while_the_one_before_is_answered_is_not_lost(run: Run, tmp_path: Path) -> None:
    job = submit(tmp_path)
    with subprocess.Popen(["sleep", "30"]) as manager:  # one that does not answer
        address = {"pid": manager.pid, "url": "https://127.0.0.1:1"}
        (job.path / "manager.json").write_text(json.dumps(address))
        screen = Impatient(job, manager)
        watcher = Watcher(job, Console(file=screen), manager=manager, may_stop=True)
        assert watcher.run() == 130
    assert screen.refusals() == 3
