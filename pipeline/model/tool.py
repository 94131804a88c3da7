"""What the tools that run in a child process share: how they answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch

from spottrain.errors import UserCodeError
from spottrain.wire import ModelFacts, Profile, encode


def answer(compute: Callable[[], ModelFacts | Profile]) -> int:
    """Print what ``compute`` returns as one line of JSON; return the exit code.

    With UserCodeError the line is ``{"error": ..., "traceback": ...}``, the code 3.
    What the user's code prints goes to stderr.
    """
    with os.fdopen(os.dup(1), "w") as stdout:
        sys.stdout.flush()
        os.dup2(2, 1)
        torch.set_num_threads(1)
        try:
            line, code = encode(compute()), 0
        except UserCodeError as error:
            line = json.dumps({"error": str(error), "traceback": error.traceback})
            code = error.exit_code
        stdout.write(line + "\n")
    return code
