"""Refuses to build from a checkout without the links that make the package whole.

Git on Windows and unpacked ZIP archives may leave text files in their place, and setuptools
would build what is left without a word. Everything else is in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup

for folder in ("cloud", "morphing", "pipeline", "pricing", "varuna_manager"):
    place = Path("src", "spottrain", folder)
    if not (place / "__init__.py").is_file():
        sys.exit(
            f"error: {place} does not lead to {folder}/: this checkout has no symbolic links. "
            "Clone it with `git clone -c core.symlinks=true` (on Windows in Developer Mode)"
        )

setup()
