"""What manager, agent, supervisor and worker say to each other, as JSON.

Standard library only: this package is carried to machines as it is. Every message is a
frozen dataclass; ``encode`` and ``decode`` turn it into JSON and back, strictly: an
unknown or missing field, a wrong type or another schema version raises ``WireError``.

    manager --Command--> agent --Command--> supervisor --> worker
    manager <--Report--- agent <--Report--- supervisor <-- worker
"""

from spottrain.wire.channel import (
    Heartbeat,
    HeartbeatAnswer,
    Registration,
    ReportBatch,
)
from spottrain.wire.codec import (
    SCHEMA_VERSION,
    decode,
    encode,
    from_data,
)
from spottrain.wire.commands import (
    AbandonGeneration,
    Calibrate,
    Command,
    Initialise,
    JobSpec,
    OpenStore,
    Retire,
    RunGeneration,
    ShareMinibatch,
    StopGeneration,
)
from spottrain.wire.model import (
    MOST_CHUNKS,
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Plan,
    Profile,
    Reduction,
    RingProfile,
    ScheduleKind,
    SectionFacts,
    SectionProfile,
    Slot,
    TaskOverheads,
    TiedParameter,
)
from spottrain.wire.reports import (
    Calibrated,
    CalibrationProgress,
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    GenerationBroken,
    GenerationStarted,
    GenerationStopped,
    InterruptionNoticed,
    MinibatchCommitted,
    Report,
    StoreOpened,
    SupervisorReady,
    UserCodeFailed,
    WorkerDied,
)

__all__ = [
    "MOST_CHUNKS",
    "SCHEMA_VERSION",
    "AbandonGeneration",
    "Calibrate",
    "Calibrated",
    "CalibrationProgress",
    "CheckpointDamaged",
    "CheckpointFailed",
    "CheckpointSaved",
    "Command",
    "Evaluated",
    "GenerationBroken",
    "GenerationStarted",
    "GenerationStopped",
    "Heartbeat",
    "HeartbeatAnswer",
    "Initialise",
    "InterruptionNoticed",
    "JobSpec",
    "LinkProfile",
    "MicrobatchProfile",
    "MinibatchCommitted",
    "ModelFacts",
    "OpenStore",
    "Plan",
    "Profile",
    "Reduction",
    "Registration",
    "Report",
    "ReportBatch",
    "Retire",
    "RingProfile",
    "RunGeneration",
    "ScheduleKind",
    "SectionFacts",
    "SectionProfile",
    "ShareMinibatch",
    "Slot",
    "StopGeneration",
    "StoreOpened",
    "SupervisorReady",
    "TaskOverheads",
    "TiedParameter",
    "UserCodeFailed",
    "WorkerDied",
    "decode",
    "encode",
    "from_data",
]
