"""Short tasks of a supervisor, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

from spottrain.manifest import CheckpointError
from spottrain.pipeline.base.output import label_output
from spottrain.pipeline.calibrate.calibrate import NoRoomError, calibrate, even_shares
from spottrain.pipeline.comm.device_group import NetworkRefusedError
from spottrain.pipeline.comm.groups import GenerationBrokenError
from spottrain.pipeline.devices.open import open_device
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.process.worker import (
    SupervisorLink,
    reason_of,
    user_code_failed,
)
from spottrain.pipeline.state.handover import UnreadableCheckpointError
from spottrain.pipeline.weights.first import write_first_weights
from spottrain.storage.store import StorageError
from spottrain.wire import messages


def initialise(
    loaded: LoadedJob,
    command: messages.Initialise,
    rank: int = 0,
    report: Callable[[messages.SectionPrepared], None] = lambda progress: None,
) -> messages.CheckpointSaved | messages.CheckpointFailed | None:
    """Take part in a round of writing the first weights.

    From then on a job starts as it resumes, and no worker holds more than its stage.

    Args:
        loaded: The job.
        command: The round.
        rank: Which of its participants this process is.
        report: Called with the progress of this one.

    Returns:
        What there is to report, if anything.

    Raises:
        UserCodeError: The model cannot be built.
        RuntimeError: The round's store is gone.
    """
    if loaded.spec.init_from:
        reason = (
            "the weights that the job began with (init_from) are no longer in "
            f"{loaded.spec.checkpoint_path}; launch the job again"
        )
        return messages.CheckpointFailed(step=0, reason=reason)

    def written(section: int) -> None:
        report(messages.SectionPrepared(generation=command.generation, section=section))

    size = len(command.participants) or 1
    share = even_shares(loaded.layout.num_sections, size)[rank]
    try:
        manifest = write_first_weights(loaded, command, rank, share, written)
    except (CheckpointError, StorageError) as error:
        return messages.CheckpointFailed(step=0, reason=str(error))
    return None if manifest is None else messages.CheckpointSaved(name=manifest.name, step=0)


def initialise_and_report(
    command: messages.Initialise, rank: int, slot: int, loaded: LoadedJob, link: SupervisorLink
) -> None:
    """Take part in writing the first weights for ``slot``, and report to the manager.

    Raises:
        UserCodeError: The model cannot be built.
    """
    label_output("first weights")
    outcome: messages.Report | None
    try:
        outcome = initialise(loaded, command, rank, link.report)
    except RuntimeError as error:
        number, reason = command.generation, reason_of(error)
        outcome = messages.GenerationBroken(generation=number, slot=slot, reason=reason)
    if outcome is not None:
        link.report(outcome)


def measure_and_report(
    command: messages.Calibrate,
    rank: int,
    slot: int,
    device: str,
    memory_share: float,
    device_name: str,
    loaded: LoadedJob,
    link: SupervisorLink,
) -> None:
    """Take part in a calibration round and report to the manager.

    Args:
        command: The round.
        rank: Which of its participants this process is.
        slot: The slot that it stands for.
        device: The slot's, see ``open_device``.
        memory_share: Of the device's memory.
        device_name: What its VM computes on, as in ``Profile``.
        loaded: The job.
        link: To the supervisor.

    Raises:
        UserCodeError: The user's code raised.
    """
    label_output(f"measuring, rank {rank}")
    try:
        exact = loaded.spec.reduction == "exact"
        opened = open_device(device, memory_share, deterministic=exact)
        profile = calibrate(
            loaded,
            command,
            rank,
            link.report,
            opened,
            device_name,
            lambda error: link.report(user_code_failed(error)),
        )
    except (NetworkRefusedError, NoRoomError) as error:
        link.report(messages.UserCodeFailed(message=str(error), traceback=""))
    except (
        GenerationBrokenError,
        CheckpointError,
        StorageError,
        RuntimeError,
    ) as error:
        if isinstance(error, UnreadableCheckpointError):
            link.report(error.report)
        link.report(
            messages.GenerationBroken(
                generation=command.generation, slot=slot, reason=reason_of(error)
            )
        )
    else:
        if profile is not None:
            number = command.generation
            link.report(messages.Calibrated(profile=profile, generation=number))
