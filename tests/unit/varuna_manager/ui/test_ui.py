"""``spottrain ui`` over real HTTP on loopback: who gets in, what pages say, what buttons do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.gpus import use
from tests.unit.varuna_manager.conftest import Manager
from tests.unit.varuna_manager.measured_jobs import evaluated, trained
from tests.unit.varuna_manager.stored_jobs import append, submit
from tests.unit.varuna_manager.story import Story

from spottrain.errors import ConfigError, SpottrainError
from spottrain.serving import Server
from spottrain.varuna_manager.api import queries
from spottrain.varuna_manager.cli.ui import serving
from spottrain.varuna_manager.config.pool import parse_pool
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import GenerationBegan, Measurements
from spottrain.varuna_manager.pool.core.model import JobRequest, JobRequested, PoolCreated
from spottrain.varuna_manager.pool.store.folder import PoolDir, create_pool
from spottrain.varuna_manager.pool.store.journal import PoolJournal
from spottrain.varuna_manager.pool.store.settings import settings_of, supplies_of
from spottrain.varuna_manager.reporting import tables
from spottrain.varuna_manager.ui.server import listen, own_token
from spottrain.varuna_manager.ui.watching import fingerprint

EVIL = "<img src=x onerror=\"alert('1')\">"


class Page(HTMLParser):
    """What is in a page that a browser would act on, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.words += data


class Panel:
    """The panel, served from a thread of its own."""

    def __init__(self) -> None:
        self.token = own_token()
        self._listener = listen(0)
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        base = f"http://{self.host}/{self.token}"
        self.http = httpx.Client(base_url=base, timeout=600, verify=False)  # no TLS
        self.server: Server = serving(self.token)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.run(self.server.serve(sockets=[self._listener]))

    def page(self, path: str = "/", code: int = 200) -> Page:
        answer = self.http.get(path)
        assert answer.status_code == code, answer.text
        return Page(answer.text)

    def press(self, path: str) -> httpx.Response:
        """Confirm what a button does, as its page does."""
        return self.http.post(path, headers={"Origin": f"http://{self.host}"})

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture
def panel() -> Iterator[Panel]:
    panel = Panel()
    yield panel
    panel.close()


def told(name: str, story: Story) -> JobDir:
    """Put a job on disk that has this life behind it."""
    job = job_dir(name)
    job.path.mkdir(parents=True)
    with contextlib.closing(Journal(job.journal)) as journal:
        journal.append(*story.steps)
    with contextlib.closing(Measurements(job.measurements)) as measured:
        rows = [trained(1, step) for step in range(1, 31)]
        measured.write([GenerationBegan(generation=1, step=0), *rows, evaluated(1, 20)])
    return job


def killed() -> Story:
    """Two VMs train; one of them is killed."""
    story = Story(max_usd=9.0).training("a", "b", steps=30)
    story.notice("a", 30.0)
    return story


def ended(story: Story) -> Story:
    """Somebody stops it at once, and nothing is rented any more."""
    story.tell(e.StopRequested, by="me", checkpoint=False, now=True)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    story.tell(e.JobReleased)
    return story


# --- Who gets in ----------------------------------------------------------------------------


def test_only_the_address_with_the_token_leads_to_pages(panel: Panel) -> None:
    for path in ("", "/", "/jobs/x", f"/{panel.token[:-1]}x/", "/static/panel.js", "/é/"):
        answer = panel.http.get(httpx.URL(f"http://{panel.host}{path}"))
        assert (answer.status_code, "spottrain ui" in answer.text) == (403, True), path
    assert panel.http.get("/static/panel.js").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8765", "", "[", "10.0.0.1"]
)
def test_another_name_for_this_machine_is_refused(panel: Panel, host: str) -> None:
    assert panel.http.get("/", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:1", "[::1]:8765"])
def test_a_tunnel_may_end_at_any_port_of_loopback(panel: Panel, host: str) -> None:
    assert panel.http.get("/", headers={"Host": host}).status_code == 200


def test_a_change_must_come_from_a_page_of_the_panel(panel: Panel, tmp_path: Path) -> None:
    job = submit(tmp_path, f"file://{tmp_path}/store")
    change = f"/jobs/{job.name}/do/limits?budget.max_usd=7"
    for headers in ({}, {"Origin": "null"}, {"Origin": "http://evil.example"}):
        assert panel.http.post(change, headers=headers).status_code == 403
    assert read_state(job).job.budget.max_usd is None
    assert panel.press(change).status_code == 303
    assert read_state(job).job.budget.max_usd == 7


def test_the_token_is_the_owners_alone_and_stays(panel: Panel) -> None:
    file = Path(os.environ["SPOTTRAIN_HOME"], "ui.token")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert own_token() == panel.token
    assert len(panel.token) == 32


def test_a_port_that_is_in_use_is_told(panel: Panel) -> None:
    with pytest.raises(ConfigError, match=r"--port: .* give another port"):
        listen(int(panel.host.rpartition(":")[2]))


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "spottrain.varuna_manager.cli.main", "ui", "--port", "0"]
    environment = {**os.environ, "SPOTTRAIN_HOME": str(tmp_path), "SSH_CONNECTION": "a 1 b 2"}
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        url = command.stdout.readline().strip()
        with httpx.stream("GET", f"{url}changes", timeout=600) as page:
            assert next(page.iter_lines()) == "data: changed"
            command.send_signal(signal.SIGINT)
            out, err = command.communicate()
    port = httpx.URL(url).port
    assert (command.returncode, out) == (0, "")
    assert f"ssh -N -L {port}:127.0.0.1:{port} " in err
    assert "Traceback" not in err


# --- What pages say -------------------------------------------------------------------------


def test_a_jobs_page_says_what_status_report_and_events_say(panel: Panel) -> None:
    job = told("demo", ended(killed()))
    words = panel.page("/jobs/demo").words
    status = queries.status(job)
    for _, line in tables.status_lines(status, read_state(job).now_s):
        assert line in words
    events = [entry.message for entry in queries.entries(job) if entry.message]
    assert [x for x in events if x not in words] == []
    (mark,) = re.findall(
        r'class="mark k-notice".*?<title>(.*?)</title>', panel.http.get("/jobs/demo").text
    )
    hit = next(x for x in queries.report(job)["timeline"] if x["kind"] == "notice")
    assert unescape(mark).endswith(f"a: {hit['text']}")


def test_each_event_is_explained_as_explain_does(panel: Panel) -> None:
    job = told("demo", killed())
    text = panel.http.get("/jobs/demo").text
    links = re.findall(r"explain/(\d+)", text)
    assert '/jobs/demo/explain/a"' in text
    assert '/jobs/demo/logs?vm=a"' in text
    told_by = [entry.seq for entry in queries.entries(job) if entry.message]
    assert list(map(int, links)) == told_by[::-1]
    assert "because of event" in panel.page("/jobs/demo/explain/a").words
    assert f"event {links[0]}: " in panel.page(f"/jobs/demo/explain/{links[0]}").words
    assert panel.page("/jobs/demo/explain/now").words.count("event ") >= 1
    assert "no event 999" in panel.page("/jobs/demo/explain/999", 404).words


def test_charts_are_of_what_was_measured(panel: Panel) -> None:
    told("demo", killed())
    charts = {chart["title"]: chart for chart in panel.http.get("/jobs/demo/charts").json()}
    loss, heldout = charts["Loss"]["lines"]
    assert loss["y"] == [1000.0 + step for step in range(1, 31)]
    assert (heldout["name"], heldout["x"]) == ("heldout", [20.0])
    names = [line["name"] for line in charts["Examples per second"]["lines"]]
    assert names == ["measured", "predicted"]
    assert charts["Dollars"]["lines"][0]["y"][-1] > 0


def test_what_people_and_clouds_wrote_is_text(panel: Panel, tmp_path: Path) -> None:
    job = submit(tmp_path, f"file://{tmp_path}/store")
    name = f"a{EVIL.replace('/', '')}"
    job.path.rename(job.path.with_name(name))
    job = job_dir(name)
    with contextlib.closing(Journal(job.journal)) as journal:
        journal.record(e.StopRequested(at_s=3.0, by=EVIL, checkpoint=True, now=False))
    job.log.write_text(f"{EVIL}\x1b[31m Authorization: Bearer abcdefghijkl\n")
    here = f"/jobs/{httpx.URL('', path=f'/{name}').raw_path.decode()[1:]}"
    for path in ("/", here, f"{here}/explain/now", f"{here}/logs", f"{here}/do/limits"):
        answer = panel.http.get(path)
        page = Page(answer.text)
        assert answer.status_code == 200, path
        assert "img" not in page.tags, path
        assert not [x for x in page.attributes if x.startswith("on") or x == "style"], path
        assert page.tags.count("script") == 2, path
        assert EVIL[:9] in page.words, path
        assert "\x1b" not in answer.text
        assert "abcdefghijkl" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_what_gpus_do_is_shown_while_the_job_is_managed(panel: Panel) -> None:
    job = told("demo", killed())
    job.keep_gpu_uses({"a": (use(), use(1, power_w=None))})
    assert "151 W" not in panel.page("/jobs/demo").words
    with job.locked(SpottrainError("it is managed")):
        words = panel.page("/jobs/demo").words
        assert [x for x in ("97%", "3.0 GB", "151 W", "64 °C") if x not in words] == []
        job.gpu_uses_file.write_text('{"a": 3}')
        assert "151 W" not in panel.page("/jobs/demo").words


def test_a_damaged_journal_hides_no_other_job(panel: Panel, tmp_path: Path) -> None:
    told("good", killed())
    bad = told("bad", killed())
    bad.journal.write_bytes(b"SQLite format 3\0" + os.urandom(5000))
    words = panel.page().words
    assert "damaged" in words
    assert "30 of 100" in words
    assert "damaged" in panel.page("/jobs/bad", 409).words


def test_a_job_that_is_gone_is_told(panel: Panel) -> None:
    job = told("demo", killed())
    panel.page("/jobs/demo")
    shutil.rmtree(job.path)
    assert "no job demo" in panel.page("/jobs/demo", 404).words
    assert "No jobs on this machine" in panel.page().words
    assert panel.page("/jobs/..%2f..", 404)


def test_logs_are_shown_by_vm_and_rank(panel: Panel, tmp_path: Path) -> None:
    job = submit(tmp_path, f"file://{tmp_path}/store")
    job.log.write_text("of the manager\n")
    for vm in ("vm-1", "vm-2"):
        log = job.cloud / "vms" / vm / "supervisor.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"[rank 0] zero of {vm}\n[rank 1] one of {vm}\n")
    here = f"/jobs/{job.name}/logs"
    assert "of the manager" in panel.page(here).words
    words = panel.page(f"{here}?vm=vm-2&rank=1").words
    assert [x for x in ("one of vm-2", "zero of vm-2", "one of vm-1") if x in words] == [
        "one of vm-2"
    ]
    assert "no logs of VM vm-3" in panel.page(f"{here}?vm=vm-3", 404).words
    assert "must be a number" in panel.page(f"{here}?rank=x", 404).words


# --- Live -----------------------------------------------------------------------------------


def test_whoever_watches_is_told_of_each_change(panel: Panel, tmp_path: Path) -> None:
    job = submit(tmp_path, f"file://{tmp_path}/store")
    with panel.http.stream("GET", f"/changes?of=jobs/{job.name}") as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert next(lines) == "data: changed"
        append(job, 1)
        assert next(lines) == "data: changed"
        with job.locked(SpottrainError("it is managed")):
            assert next(lines) == "data: changed"


def test_the_list_notices_jobs_that_come_and_go(panel: Panel) -> None:
    with panel.http.stream("GET", "/changes") as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert next(lines) == "data: changed"
        job = told("demo", killed())
        assert next(lines) == "data: changed"
        shutil.rmtree(job.path)
        assert next(lines) == "data: changed"


def test_looking_for_changes_opens_no_journal() -> None:
    job = told("demo", killed())
    seen = fingerprint([job])
    job.journal.chmod(0)
    job.measurements.chmod(0)
    assert fingerprint([job]) == seen
    os.utime(job.journal, ns=(1, 1))
    assert fingerprint([job]) != seen


# --- Buttons --------------------------------------------------------------------------------


def test_stopping_says_what_it_costs_and_asks_the_manager(panel: Panel, manager: Manager) -> None:
    job = told("demo", killed())
    shutil.copy(manager.job_dir / "identity.pem", job.path)
    address = {"pid": os.getpid(), "url": manager.url}
    (job.path / "manager.json").write_text(json.dumps(address))
    with job.locked(SpottrainError("it is managed")):
        words = panel.page("/jobs/demo/do/stop").words
        assert "2 VMs, $2.00 an hour, will be returned." in words
        assert "A checkpoint is saved first" in words
        assert (
            "30 steps since the checkpoint of step 0"
            in panel.page("/jobs/demo/do/stop?now=1").words
        )
        assert manager.handler.stops == []
        assert panel.press("/jobs/demo/do/stop").status_code == 303
        assert panel.press("/jobs/demo/do/stop?now=1").status_code == 303
        assert manager.handler.stops == [("the panel", True, False), ("the panel", False, True)]
    assert "not possible now" in panel.page("/jobs/demo/do/stop", 404).words


def test_limits_that_would_end_the_job_are_confirmed_first(panel: Panel, tmp_path: Path) -> None:
    job = told("demo", ended(killed()))
    asked = "/jobs/demo/do/limits?budget.max_usd=0.0001"
    assert "would end the job" in panel.page(asked).words
    assert panel.press(asked).status_code == 409
    assert read_state(job).job.budget.max_usd == 9
    assert panel.press(f"{asked}&sure=1").status_code == 303
    assert read_state(job).job.budget.max_usd == 0.0001
    assert "budget.max_usd" in panel.page("/jobs/demo/do/limits?budget.max_usd=many", 404).words


def test_resuming_says_what_the_rest_costs(panel: Panel) -> None:
    told("demo", ended(killed()))
    words = panel.page("/jobs/demo/do/resume").words
    assert "At most 4 VMs will be rented" in words
    assert "70 steps are left" in words
    assert "the budget leaves $" in words


# --- Pools ----------------------------------------------------------------------------------


@pytest.fixture
def pool(panel: Panel) -> PoolDir:
    data: dict[str, Any] = {"name": "lab", "max_vms": 4}
    config = parse_pool(data, "lab.yaml")
    supplies = supplies_of(config, {"local/cpu": 0.1})
    pool = create_pool(
        config, PoolCreated(at_s=0.0, settings=settings_of(config), supplies=supplies)
    )
    request = JobRequest(name="j", throughputs=(((1, 1.0), (2, 2.0)),), examples=80.0)
    with contextlib.closing(PoolJournal(pool.journal)) as journal:
        journal.record(JobRequested(at_s=1.0, request=request))
    return pool


def test_a_pool_is_shown_without_its_daemon(panel: Panel, pool: PoolDir) -> None:
    assert "unserved" in panel.page().words
    page = panel.page("/pools/lab")
    assert "VMs that each job held" in page.words
    assert "style" not in page.tags
    assert "no job nobody" in panel.page("/pools/lab/do/pause/nobody", 404).words


def test_a_pools_limits_and_pauses_say_what_they_cost(panel: Panel, pool: PoolDir) -> None:
    assert "0 of 4 VMs are rented, for $0.00 an hour." in panel.page("/pools/lab/do/limits").words
    assert "From now on: max_vms=2" in panel.page("/pools/lab/do/limits?max_vms=2").words
    assert "It saves a checkpoint" in panel.page("/pools/lab/do/pause/j").words
    answer = panel.press("/pools/lab/do/pause/j")  # its daemon does not run
    assert (answer.status_code, "pool resume lab" in answer.text) == (409, True)
