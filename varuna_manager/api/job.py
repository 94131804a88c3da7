"""``import spottrain`` drives jobs: ``launch``, ``job``, ``jobs`` and what a ``Job`` can do.

Nothing prints. What commands tell people goes to the logger ``spottrain``, at INFO.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from spottrain.errors import ConfigError, SpottrainError
from spottrain.pickled import ENTRYPOINT
from spottrain.varuna_manager.api import actions, queries
from spottrain.varuna_manager.api.trouble import trouble_of_machine
from spottrain.varuna_manager.config.job import JobConfig, config_of, load_config
from spottrain.varuna_manager.config.overrides import flat, overridden
from spottrain.varuna_manager.config.yaml_core import NO_LINES
from spottrain.varuna_manager.core.model.commands import Outcome
from spottrain.varuna_manager.jobs.folder import JobDir, all_jobs, find
from spottrain.varuna_manager.jobs.follow import Follower, folder_of, read_state, uid_of
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.varuna_manager.launch import asking, control, weights
from spottrain.varuna_manager.launch.changes import Changes
from spottrain.varuna_manager.reporting.tables import live_panel
from spottrain.wire.model import ExportFormat

if TYPE_CHECKING:
    from spottrain import TrainingJob

logger = logging.getLogger("spottrain")

POLL_S = 0.25
STOPPED = 130
"""Exit code of a job that somebody stopped."""
WIDTH = 100
"""Of the panel in a notebook, in characters."""
_BY = "Python"
_ENVIRONMENT = threading.RLock()
"""Held while the environment of this process is that of a job."""


class MachineError(SpottrainError):
    """This machine, such as its disk, does not do what a job needs."""


class StillRunningError(SpottrainError, TimeoutError):
    """The job has not ended in the time that was given."""


class JobFailedError(SpottrainError):
    """A job has ended before its last step, and nobody stopped it.

    Args:
        reason: One line.
        exit_code: As ``spottrain launch`` would exit: 3 for the user's code, 4 for budget
            or deadline, 5 for capacity, 6 for a cloud.
        traceback: The user's, if their code raised.
    """

    def __init__(self, reason: str, exit_code: int, traceback: str = "") -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.traceback = traceback


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Turn what is wrong with this machine into a ``MachineError``."""
    try:
        yield
    except SpottrainError:
        raise
    except Exception as error:
        if trouble := trouble_of_machine(error):
            raise MachineError(trouble) from error
        raise


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Give this process its environment back: checks and managers need that of the job.

    Other threads wait for it with their own launches.
    """
    with _ENVIRONMENT:
        before = dict(os.environ)
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update({k: v for k, v in before.items() if os.environ.get(k) != v})


def _say(line: str) -> None:
    level = logging.WARNING if line.startswith("warning: ") else logging.INFO
    logger.log(level, "%s", line.removeprefix("warning: "))


class Job:
    """A job on this machine, whether it runs or has ended.

    A handle: it keeps nothing but which job it is, and reads the job's folder each time.
    It serves any number of processes and threads at a time.

    Raises:
        ConfigError: There is no such job on this machine.
    """

    def __init__(self, name: str) -> None:
        folder = find(name)
        self._name, self._uid = folder.name, ""
        with contextlib.suppress(SpottrainError):  # it can still be taken down
            self._uid = uid_of(folder)

    @property
    def name(self) -> str:
        """The job's name; ``NAME.1``, ``NAME.2``, … once another job has its name."""
        return folder_of(self._name, self._uid).name

    @property
    def folder(self) -> Path:
        """Where its journal, its log and, by default, its checkpoints are."""
        return folder_of(self._name, self._uid).path

    def _here(self) -> JobDir:
        """Return the job's folder, if its manager is on this machine."""
        folder = folder_of(self._name, self._uid)
        if folder.remote_manager_file.exists():
            raise ConfigError(
                f"job {folder.name} has its manager on a VM of its own, where only commands reach "
                f"it: 'spottrain status {folder.name}'"
            )
        return folder

    # --- What is known of it ----------------------------------------------------------

    @_plainly()
    def status(self) -> dict[str, Any]:
        """Return its state, step, loss, speed, plan, VMs and spending, as ``spottrain status
        NAME -o json`` prints them.

        Raises:
            SpottrainError: Its journal cannot be read.
        """
        return queries.status(self._here())

    @_plainly()
    def report(self) -> dict[str, Any]:
        """Return what it did and what happened to it, as ``spottrain report NAME -o json``;
        raises as ``status``."""
        return queries.report(self._here())

    @_plainly()
    def cost(self) -> dict[str, Any]:
        """Return what it cost and what the money went to, as ``spottrain cost NAME -o json``;
        raises as ``status``."""
        return queries.cost(self._here())

    @_plainly()
    def events(self) -> list[dict[str, Any]]:
        """Return all that happened, oldest first, as ``spottrain events NAME -o json``;
        ``message`` is for people. Raises as ``status``."""
        return [queries.event(entry) for entry in queries.entries(self._here())]

    @_plainly()
    def metrics(self, *, every: int = 1, last: int | None = None) -> Any:
        """Return loss, speed and the user's metrics of each mini-batch of the final history.

        Args:
            every: Of so many mini-batches one.
            last: Only of the newest ones.

        Returns:
            Columns: a ``pandas.DataFrame`` where pandas is installed, else a dictionary of
            lists by name. Both have ``step``, ``loss``, ``step_s``, ``usd_spent`` and so on
            (docs/metrics.md); metrics of the user's own are ``metrics.NAME``.

        Raises:
            SpottrainError: The measurements cannot be read.
        """
        with closing(Measurements(self._here().measurements, read_only=True)) as measured:
            rows = measured.minibatches(last=last, every=every)
            return _table(queries.columns(rows, queries.OF_MINIBATCHES))

    @_plainly()
    def evaluations(self) -> Any:
        """Return what was measured on held-out sets, in columns as those of ``metrics``."""
        with closing(Measurements(self._here().measurements, read_only=True)) as measured:
            return _table(queries.columns(measured.evaluations(), queries.OF_EVALUATIONS))

    # --- What is done with it ---------------------------------------------------------

    @_plainly()
    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until it has ended, and everything it rented is returned.

        An interrupt, as of a notebook's cell, ends the waiting alone: the job runs on.

        Args:
            timeout_s: Wait no longer than this.

        Returns:
            Its ``status``: it has succeeded, or somebody has stopped it or taken it down.

        Raises:
            JobFailedError: It ended for another reason.
            StillRunningError: It has not ended in time.
            ManagerGoneError: Its manager is gone, and it has not ended.
            KeyboardInterrupt: The waiting was interrupted; says how to go on.
        """
        job = self._here()
        outcome = self._outcome(job, timeout_s)
        if outcome.exit_code in (0, STOPPED):
            return queries.status(job)
        failure = JobFailedError(
            f"job {job.name}: {outcome.reason}", outcome.exit_code, outcome.traceback
        )
        for note in (outcome.traceback.rstrip(), queries.how_to_fix(read_state(job))):
            if note:
                failure.add_note(note)
        raise failure

    def _outcome(self, job: JobDir, timeout_s: float | None = None) -> Outcome:
        """Return how a job ended, once it has; raises as ``wait``."""
        give_up_at_s = None if timeout_s is None else time.monotonic() + timeout_s
        with closing(Follower(job, from_now=True)) as follower:
            try:
                while True:
                    gone = not job.is_managed()
                    for entry in follower.advance():
                        if entry.message:
                            logger.info("%s: %s", job.name, entry.message)
                    if gone:
                        return actions.outcome_of(job, follower.state)
                    if give_up_at_s is not None and time.monotonic() > give_up_at_s:
                        raise StillRunningError(
                            f"job {job.name} has not ended in {timeout_s:g} s, and runs on; "
                            "wait() waits again, stop() stops it"
                        )
                    time.sleep(POLL_S)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"job {job.name} runs on; wait() waits again, stop() stops it"
                ) from None

    @_plainly()
    def stop(self, *, now: bool = False) -> dict[str, Any]:
        """Save a checkpoint and return the VMs; ``resume`` continues it.

        Args:
            now: Return the VMs at once, without a checkpoint.

        Returns:
            Its ``status``, once nothing is rented any more.

        Raises:
            SpottrainError: It does not run, or its manager does not answer.
            KeyboardInterrupt: The waiting for its end was interrupted; it is ending.
        """
        job = self._here()
        control.stop_job(job, now=now, by=_BY)
        self._outcome(job)
        return queries.status(job)

    @_plainly()
    def resume(
        self,
        training_job: TrainingJob | None = None,
        *,
        update_code: bool = False,
        workdir: str | os.PathLike[str] | None = None,
        steps: int | None = None,
        from_scratch: bool = False,
    ) -> Job:
        """Continue it where it was stopped, failed or lost its manager.

        It goes on with the code that it has. What the weights depend on must stay; the
        learning rate, the loss or the data may be others from now on.

        Args:
            training_job: Goes on in place of the one it was launched with, if that was an
                object, too.
            update_code: Send the files of its work folder as they are now.
            workdir: Where these files are now; with ``training_job``: whose files go along.
            steps: Of the whole job.
            from_scratch: Begin again if no checkpoint of it can be used.

        Returns:
            Itself; its manager runs.

        Raises:
            SpottrainError: It runs, has ended for good, or its weights do not fit the code.
        """
        job = self._here()
        files = None if workdir is None else Path(workdir).absolute()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_own_environment())
            if training_job is not None:
                if job.config().entrypoint != ENTRYPOINT:
                    raise ConfigError(
                        f"job {job.name} was launched from a job file; change its code, then "
                        "resume(update_code=True)"
                    )
                files = stack.enter_context(_work_folder(training_job, files))
            has_code = update_code or training_job is not None
            changes = Changes(code=has_code, workdir=files, steps=steps)
            _, manager = actions.resume(job.name, changes, _say, from_scratch=from_scratch)
            _await(job, manager)
        return self

    @_plainly()
    def down(self) -> None:
        """End it for good and return everything it rents; its report stays.

        Raises:
            CloudError: VMs still run afterwards.
        """
        control.end_job(self._here(), _say)

    @_plainly()
    def export(
        self,
        to: str | os.PathLike[str],
        kind: ExportFormat = "safetensors",
        *,
        step: int | None = None,
        best: bool = False,
        full: bool = False,
        ema: bool = False,
    ) -> weights.Export:
        """Write the weights of a checkpoint as PyTorch or transformers load them.

        Args:
            to: A folder that is missing or empty.
            kind: ``safetensors`` or ``torch``: a state dict; ``hf``: what
                ``from_pretrained`` loads.
            step: Of the checkpoint; by default the newest.
            best: Take the best one by evaluation instead.
            full: Frozen parameters, too.
            ema: The moving average of the weights.

        Returns:
            What was written; ``load`` are the lines of Python that load it.

        Raises:
            SpottrainError: There is no such checkpoint, or the folder cannot be written.
        """
        with _own_environment():
            return weights.export(
                self._here().name, Path(to), kind, step=step, best=best, full=full, ema=ema
            )

    # --- In a notebook ----------------------------------------------------------------

    def __repr__(self) -> str:
        """Return its name, state and step in one line."""
        try:
            now = queries.brief(self._here())
        except (SpottrainError, OSError) as error:
            return f"<spottrain.Job {self._name}: {error}>"
        return (
            f"<spottrain.Job {now['name']}: {now['state']}, step {now['step']} of {now['steps']}>"
        )

    def _repr_html_(self) -> str:
        """Return the panel of ``spottrain status`` as HTML."""
        panel: RenderableType
        try:
            panel = live_panel(self.status(), None)
        except (SpottrainError, OSError) as error:
            panel = f"job {self._name}: {error}"
        screen = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False)
        screen.print(panel, markup=False)
        return screen.export_html(inline_styles=True, code_format=_PANEL)


_PANEL = '<pre style="font-family:monospace;line-height:1.2;white-space:pre">{code}</pre>'


@_plainly()
def launch(
    job: TrainingJob | str | os.PathLike[str],
    *,
    name: str | None = None,
    steps: int | None = None,
    env: Mapping[str, str | float | bool] | None = None,
    provider: str | Sequence[str] | None = None,
    adopt: bool = False,
    **settings: Any,
) -> Job:
    """Start a job; the call returns once its manager runs, which outlives this process.

    It makes the same checks as ``spottrain launch``, and raises what that would print.

    Args:
        job: A ``TrainingJob``, which may be defined in a notebook, or the path of a job
            file.
        name: Of the job, unique on this machine.
        steps: Number of optimizer steps of the whole job.
        env: Environment variables for the user's code.
        provider: Where machines come from: ``local``, ``ssh``, ``aws``, ``azure``,
            ``gcp``, or several clouds.
        adopt: Go on from checkpoints of another job.
        **settings: Further keys of the job file (docs/configuration.md), sections as
            mappings: ``minibatch_size=16, budget={"max_usd": 5}``. They replace what the
            file says key by key. Paths are relative to the job file; without one to
            the current folder. Without a job file, ``workdir`` names a folder whose files
            go along, such as modules that the notebook imports.

    Raises:
        ConfigError: A setting is wrong, or the name is in use.
        UserCodeError: The user's code raises, or cannot be pickled.
        SpottrainError: As its subclasses say: budget, capacity, a cloud, this machine.
    """
    asked = {"name": name, "steps": steps, "env": env, "resources.provider": provider}
    given = {key: value for key, value in asked.items() if value is not None} | settings
    with _own_environment(), _config(job, given) as config:
        folder, _ = actions.submit_checked(config, _say, adopt=adopt)
        actions.say_how_to_move(folder, _say)
        _await(folder, folder.start())
    return Job(folder.name)


def job(name: str) -> Job:
    """Return a job on this machine by its name, whether it runs or has ended.

    Raises:
        ConfigError: There is none; names those that there are.
    """
    return Job(name)


def jobs() -> list[Job]:
    """Return all jobs on this machine, sorted by name."""
    return [Job(folder.name) for folder in all_jobs()]


@contextlib.contextmanager
def _config(job: object, given: dict[str, Any]) -> Iterator[JobConfig]:
    """Yield the configuration of a launch; its work folder stays for as long."""
    if isinstance(job, str | os.PathLike):
        yield load_config(Path(job), overrides=flat(given))
        return
    # Not above: cloudpickle is for objects alone.
    from spottrain.varuna_manager.api.objects import is_training_job

    if not is_training_job(job):
        raise ConfigError(
            "launch needs a TrainingJob or the path of a job file: got "
            f"{type(job).__name__}; call the function that returns your TrainingJob"
        )
    if "entrypoint" in given:
        raise ConfigError("entrypoint: is for job files; leave it out, the TrainingJob is given")
    files = given.pop("workdir", None)
    data, _ = overridden({}, NO_LINES, flat(given), "launch")
    # First with any folder: what is wrong with settings is found before anything is written.
    data |= {"entrypoint": ENTRYPOINT, "workdir": str(files or ".")}
    config = config_of(data, "launch", Path.cwd())
    with _work_folder(job, Path(config.workdir) if files else None) as folder:
        yield config.model_copy(update={"workdir": str(folder)})


def _work_folder(
    training_job: object, files: Path | None
) -> contextlib.AbstractContextManager[Path]:
    # Not above: cloudpickle is for objects alone.
    from spottrain.varuna_manager.api.objects import work_folder

    return work_folder(training_job, files, _say)


def _await(job: JobDir, manager: Popen[bytes]) -> None:
    """Wait until a manager serves its job; take note of its end whenever that comes."""
    threading.Thread(target=manager.wait, name=f"manager of {job.name}", daemon=True).start()
    asking.await_manager(job, manager)


def _table(columns: dict[str, list[Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return columns
    return pandas.DataFrame(columns)
