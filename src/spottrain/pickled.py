"""The entrypoint of jobs whose ``TrainingJob`` was made in a notebook: standard library only.

``spottrain.launch`` pickles the object with cloudpickle into the work folder
(``varuna_manager/api/objects.py``) and puts cloudpickle beside it; on each machine this
module reads it.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from spottrain.errors import UserCodeError

ENTRYPOINT = f"{__name__}:training_job"
FILE = "training_job.pickle"
"""Its name in the work folder: a line with the version of Python, then the pickle."""


def python_version() -> str:
    """Return the version of Python up to what pickled functions depend on, such as 3.13."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def training_job() -> Any:
    """Return the ``TrainingJob`` in the work folder, which is first on ``sys.path``.

    Raises:
        UserCodeError: Another version of Python has pickled it, or it needs a module that
            is not here.
    """
    made_by, _, data = Path(sys.path[0], FILE).read_bytes().partition(b"\n")
    if made_by.decode() != python_version():
        raise UserCodeError(
            f"the TrainingJob was pickled by Python {made_by.decode()}, and this machine has "
            f"{python_version()}: functions differ between them; launch from the same version, "
            "or write the job into a module that a job file names"
        )
    try:
        return pickle.loads(data)
    except ModuleNotFoundError as error:
        raise UserCodeError(
            f"the TrainingJob needs the module {error.name}, which is not on this machine; if "
            "it is yours, name its folder: launch(..., workdir=FOLDER); else install it there"
        ) from error
