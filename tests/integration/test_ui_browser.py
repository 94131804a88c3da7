"""The panel in a browser, beside the quickstart: its scripted kill comes onto the lane by itself."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spottrain.varuna_manager.cli.init import Starter, write
from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.follow import read_state

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="'pip install selenium' lets a test drive a browser"
)
support = pytest.importorskip("selenium.webdriver.support.ui")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="'apt-get install chromium chromium-driver' lets a test look at the panel",
    ),
]

LAG_S = 2.0
READS = 5
"""Readings of the page that may lie between a kill and the look that shows it, each of which
takes as long as this machine is slow."""
WATCH = """
const look = () => {
  const mark = document.querySelector("#lanes .k-kill");
  if (!mark) return;
  observer.disconnect();
  const read = performance.getEntriesByType("resource").filter((one) => one.initiatorType === "fetch");
  window.killed = [Date.now() / 1000, Math.max(0, ...read.map((one) => one.duration)) / 1000, mark.textContent];
};
const observer = new MutationObserver(look);
observer.observe(document, { childList: true, subtree: true });
look();
"""
"""Notes when the mark of a kill comes, the longest reading until then, and its words."""


@pytest.fixture
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,1500"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def test_a_kill_is_on_the_lane_within_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Any
) -> None:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "home"))
    spottrain = [sys.executable, "-m", "spottrain.varuna_manager.cli.main"]
    file = write(tmp_path / "quickstart", Starter.QUICKSTART)
    with contextlib.ExitStack() as stack:
        panel = stack.enter_context(
            subprocess.Popen([*spottrain, "ui", "--port", "0"], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(panel.terminate)
        assert panel.stdout is not None
        url = panel.stdout.readline().strip()
        subprocess.run([*spottrain, "launch", file, "--detach"], check=True)
        job = job_dir("quickstart")
        stack.callback(subprocess.run, [*spottrain, "down", job.name, "--yes"], check=True)
        browser.get(f"{url}jobs/{job.name}")
        browser.execute_script(WATCH)
        wait = support.WebDriverWait(browser, timeout=1200)
        shown_at_s, read_s, words = wait.until(lambda b: b.execute_script("return window.killed"))
        kill = next(
            hit for hit in read_state(job).history.interruptions if hit.interruption == "kill"
        )
        assert kill.vm_id in words
        assert shown_at_s - kill.at_s <= LAG_S + READS * read_s
        assert browser.find_elements("css selector", "#charts canvas")
        assert [x for x in browser.get_log("browser") if x["level"] == "SEVERE"] == []
        browser.save_screenshot(str(tmp_path / "panel.png"))
