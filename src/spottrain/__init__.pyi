from spottrain import hf, lightning, optim, schedules
from spottrain.cloud.data.shards import Shards
from spottrain.datasets import data_path
from spottrain.errors import SpottrainError
from spottrain.pipeline.model.job import CallbackInfo, Callbacks, CutPoint, Helper, TrainingJob
from spottrain.steps import step
from spottrain.varuna_manager.api.job import Job, JobFailedError, job, jobs, launch

__all__ = [
    "CallbackInfo",
    "Callbacks",
    "CutPoint",
    "Helper",
    "Job",
    "JobFailedError",
    "Shards",
    "SpottrainError",
    "TrainingJob",
    "__version__",
    "data_path",
    "hf",
    "job",
    "jobs",
    "launch",
    "lightning",
    "optim",
    "schedules",
    "step",
]
__version__: str
