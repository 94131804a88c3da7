"""``python -m spottrain.cloud.local STATE_DIR``: the local cloud's own process."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from spottrain.cloud.local.folder import LocalFolder
from spottrain.cloud.local.server import run


def main() -> None:
    """Detach from the parent and its terminal, then serve."""
    parser = argparse.ArgumentParser(prog="python -m spottrain.cloud.local")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--ready-fd", type=int)
    args = parser.parse_args()
    if os.fork():
        os._exit(0)  # detach from the parent, to leave no zombie
    os.setsid()
    run(LocalFolder(args.state_dir), args.ready_fd)


if __name__ == "__main__":
    main()
