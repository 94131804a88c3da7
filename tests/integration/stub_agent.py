"""The real agent over the stub supervisor beside this file; started as a VM's agent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from spottrain.varuna_manager.agent import main

if __name__ == "__main__":
    supervisor = Path(__file__).with_name("stub_supervisor.py")
    os._exit(main.main([sys.argv[-1], sys.executable, str(supervisor)]))
