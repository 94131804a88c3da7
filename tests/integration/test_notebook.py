"""The notebook of the examples, run by a kernel as in Jupyter: its cells' objects reach VMs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.jobs import DEADLINE_S, share_inspections

import spottrain

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
RUN = """
import nbformat, sys
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=None).execute()
nbformat.write(notebook, sys.argv[1])
"""


def run(folder: Path, *arguments: str | Path) -> str:
    """Run Python in a folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.rotated
def test_the_notebook_trains_what_its_cells_define_through_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = tmp_path / "notebook.ipynb"
    shutil.copy(EXAMPLE, notebook)
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "home"))
    share_inspections(tmp_path / "home")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    run(tmp_path, "-c", RUN, notebook)
    report = spottrain.job("notebook").report()
    assert (report["state"], report["steps_done"]) == ("succeeded", 300)
    assert report["preemptions_unnoticed"] == 1, "the kill"
    assert report["loss_last"] < report["loss_first"]
    assert list((tmp_path / "notebook-weights").glob("*.safetensors"))
    shown = json.loads(notebook.read_text())["cells"]
    assert any("text/html" in out.get("data", {}) for c in shown for out in c.get("outputs", ()))


@pytest.mark.rotated
def test_a_script_stops_its_job_and_goes_on_with_another_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "home"))
    said = json.loads(run(tmp_path, Path(__file__).with_name("scripted_job.py")))
    state, step = said["stopped"]
    assert (state, said["reason"]) == ("stopped", "stopped by Python")
    assert step >= said["first"]
    misfit, not_sent = said["refused"]
    assert "weights do not fit the new code" in misfit
    assert "resume(TrainingJob(...)) sends a new one" in not_sent
    assert said["ended"] == ["succeeded", step + 5]
    assert said["rates"] == [1e-3, *[2e-3] * 5]
