"""``python -m spottrain.cloud.data FOLDER LIMIT_S < requests``: prepares a job's data.

Prints progress, one line each; the last line is the environment as JSON, or the error.
Exit codes: 0 done, 3 the job's author must act, 75 a retry may succeed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from spottrain.cloud.data.cache import Cache
from spottrain.cloud.data.prepare import fetch_data
from spottrain.cloud.data.request import DataError, DataUnavailableError, from_json

TRY_AGAIN_LATER = os.EX_TEMPFAIL


def main(argv: Sequence[str]) -> int:
    """Prepare the data requested on stdin; ``argv``: cache folder, limit (s)."""
    limit_s = float(argv[1])
    limit = threading.Timer(limit_s, _give_up, (limit_s,))
    limit.daemon = True
    limit.start()
    try:
        cache = Cache(Path(argv[0]), may_evict=True)
        _print(json.dumps(fetch_data(from_json(sys.stdin.read()), cache, _print)))
    except DataError as error:
        _print(str(error))
        return DataError.exit_code
    except DataUnavailableError as error:
        _print(str(error))
        return TRY_AGAIN_LATER
    except OSError as error:
        _print(f"data: {error}")
        return TRY_AGAIN_LATER
    return 0


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _give_up(limit_s: float) -> None:
    _print(f"data: took longer than {limit_s:g} s; raise data_limit_s")
    os._exit(DataError.exit_code)  # even if a thread hangs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
