"""Job folders, packing the workdir, and putting a job on disk."""

import contextlib
import fcntl
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import model_facts, section_facts
from tests.fakes.object_store import S3

from spottrain.errors import BudgetError, ConfigError
from spottrain.eventlog.folder import home
from spottrain.pricing.billing.budget import WORTH_S, reserve_s
from spottrain.pricing.billing.money import Money, Rate
from spottrain.storage.open import open_store
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.core.model.events import JobSubmitted
from spottrain.varuna_manager.jobs import folder as folders
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch import submit
from spottrain.varuna_manager.launch import workdir as workdirs
from spottrain.wire.model import LAYOUT_FILE

FACTS = model_facts(
    [section_facts(param_bytes=40, optimizer_bytes=80)],
    fingerprint="f",
    num_parameters=10,
)


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "inner").mkdir(parents=True)
    (folder / "train.py").write_text("x = 1\n")
    (folder / "inner" / "more.py").write_text("y = 2\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "train.pyc").write_text("z")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    return folder


def config_for(workdir: Path, **changes: Any) -> JobConfig:
    data = {
        "name": "demo",
        "entrypoint": "train:job",
        "workdir": str(workdir),
        "minibatch_size": 8,
        "steps": 5,
    }
    return parse_config({**data, **changes}, "job.yaml")


def test_only_the_users_own_files_are_packed(workdir: Path, tmp_path: Path) -> None:
    os.mkfifo(workdir / "pipe")
    (workdir / "again.py").symlink_to("train.py")
    files = workdirs.packed_files(workdir)
    names = ["again.py", "inner/more.py", "train.py"]
    assert [file.as_posix() for file in files] == names
    size = workdirs.pack(workdir, files, tmp_path / "a.tar.gz")
    assert size == (tmp_path / "a.tar.gz").stat().st_size
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert (tmp_path / "out" / "again.py").read_text() == "x = 1\n"
    assert (tmp_path / "out" / "inner" / "more.py").read_text() == "y = 2\n"


def test_the_same_files_make_the_same_package(workdir: Path, tmp_path: Path) -> None:
    files = workdirs.packed_files(workdir)
    for name in ("a", "b"):
        workdirs.pack(workdir, files, tmp_path / name)
        os.utime(workdir / "train.py", (1, 1))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_layout_goes_with_the_package_and_is_none_of_the_users_files(
    workdir: Path, tmp_path: Path
) -> None:
    layout, out = tmp_path / "kept.layout", tmp_path / "out"
    layout.write_bytes(b"layout")
    files = workdirs.packed_files(workdir)
    workdirs.pack(workdir, files, tmp_path / "a.tar.gz", layout)
    workdirs.pack(workdir, files, tmp_path / "b.tar.gz", tmp_path / "none")
    workdirs.unpack(tmp_path / "a.tar.gz", out)
    assert (out / LAYOUT_FILE).read_bytes() == b"layout"
    assert workdirs.packed_files(out) == files
    assert workdirs.differing(tmp_path / "a.tar.gz", tmp_path / "b.tar.gz") == []


def test_the_fingerprint_changes_with_names_and_contents(workdir: Path) -> None:
    def now() -> str:
        return workdirs.fingerprint(workdir, workdirs.packed_files(workdir))

    seen = {now(), now()}
    (workdir / "train.py").write_text("x = 2\n")
    seen.add(now())
    (workdir / "train.py").rename(workdir / "other.py")
    seen.add(now())
    assert len(seen) == 3


@pytest.mark.parametrize("target", ["/etc/hostname", "../../outside"])
def test_a_link_out_of_the_workdir_is_refused(workdir: Path, target: str) -> None:
    (workdir / "inner" / "data").symlink_to(target)
    with pytest.raises(
        ConfigError,
        match=r"workdir: link .*data points to .*, which VMs do .*; replace",
    ):
        workdirs.packed_files(workdir)


def test_a_workdir_with_data_in_it_is_refused(workdir: Path) -> None:
    with open(workdir / "data.bin", "wb") as file:
        file.truncate(workdirs.MAX_BYTES)
    with pytest.raises(ConfigError, match="move data out of it"):
        workdirs.packed_files(workdir)


def test_the_state_directory_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home() == tmp_path / "home"
    monkeypatch.delenv("SPOTTRAIN_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert home() == tmp_path / "xdg" / "spottrain"


def test_a_submitted_job_is_found_with_all_its_parts(workdir: Path) -> None:
    config = config_for(workdir, slo={"max_hours": 1})
    job, _ = submit.submit(config, FACTS)
    assert folders.find("demo") == job
    assert folders.all_jobs() == [job]
    assert job.config() == config
    assert job.facts() == FACTS
    assert job.path.stat().st_mode & 0o077 == 0
    assert not job.is_managed()
    with contextlib.closing(Journal(job.journal, read_only=True)) as journal:
        ((_, event),) = journal.read()
    assert isinstance(event, JobSubmitted)
    assert event.settings.spec.name == "demo"
    assert event.settings.spec.microbatch_size == 4
    assert event.settings.spec.checkpoint_path == str(job.checkpoints)
    assert event.settings.deadline_s == event.at_s + 3600


def test_a_manager_is_seen_by_its_lock(workdir: Path) -> None:
    job, _ = submit.submit(config_for(workdir), FACTS)
    with open(job.path / "manager.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert job.is_managed()
        with pytest.raises(ConfigError, match="job demo is running"):
            submit.submit(config_for(workdir), FACTS)
    assert not job.is_managed()


def test_a_job_that_can_be_resumed_keeps_its_name(workdir: Path) -> None:
    submit.submit(config_for(workdir), FACTS)
    with pytest.raises(
        ConfigError, match=r"name: a job demo can be resumed.*'spottrain resume demo'"
    ):
        submit.check_name("demo")
    with pytest.raises(ConfigError, match=r"^name: "):
        submit.submit(config_for(workdir), FACTS)
    assert [job.name for job in folders.all_jobs()] == ["demo"]
    assert len(list((home() / "jobs").iterdir())) == 1


def test_a_job_that_was_ended_makes_room_and_stays_readable(workdir: Path) -> None:
    for _ in range(3):
        job, _ = submit.submit(config_for(workdir), FACTS)
        job.mark_down()
    assert [job.name for job in folders.all_jobs()] == ["demo", "demo.1", "demo.2"]


def test_a_failed_submit_leaves_nothing_behind(workdir: Path) -> None:
    (workdir / "bad").symlink_to("/etc")
    with pytest.raises(ConfigError, match="workdir: link "):
        submit.submit(config_for(workdir), FACTS)
    assert list((home() / "jobs").iterdir()) == []


def test_an_unknown_job_is_refused_with_a_list_of_known_ones(workdir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no job demo on this machine; those in .*/jobs: none"):
        folders.find("demo")
    submit.submit(config_for(workdir), FACTS)
    with pytest.raises(ConfigError, match=r"/jobs: demo"):
        folders.find("dem")


def test_an_unwritable_checkpoint_path_is_refused(workdir: Path, tmp_path: Path) -> None:
    def check(path: Path) -> None:
        submit.check_store(config_for(workdir, checkpoint={"path": str(path)}))

    check(tmp_path / "new" / "folder")
    with pytest.raises(ConfigError, match=r"checkpoint\.path: cannot write "):
        check(workdir / "train.py" / "below")
    with pytest.raises(ConfigError, match=r"checkpoint\.path: cannot write "):
        check(Path("/proc/nowhere"))


def test_a_bucket_for_checkpoints_is_tried_before_anything_is_rented(workdir: Path, s3: S3) -> None:
    def check(path: str) -> None:
        submit.check_store(config_for(workdir, checkpoint={"path": path}))

    check(s3.url("jobs"))
    assert open_store(s3.url()).list() == []
    with pytest.raises(ConfigError, match=r"checkpoint\.path: .*bucket"):
        check(s3.url().replace("bucket-", "nobody-"))


def zone(price: float) -> dict[str, Any]:
    return {"zones": [{"spot_usd_per_hour": price, "on_demand_usd_per_hour": 100.0}]}


def test_a_budget_below_one_step_is_refused(workdir: Path) -> None:
    def check(**budget: float) -> None:
        submit.check_budget(
            config_for(workdir, budget=budget, local=zone(3.6), manager={"lease_s": 99})
        )

    check()
    check(max_usd=0.67, max_usd_per_hour=3.6)
    with pytest.raises(BudgetError, match="less than one step costs"):
        check(max_usd=0.66)
    check(max_gpu_hours=0.19)
    with pytest.raises(BudgetError, match=r"^budget\.max_gpu_hours: 0.18 is less than one step"):
        check(max_gpu_hours=0.18)
    with pytest.raises(
        BudgetError,
        match=r"budget\.max_usd_per_hour: .* does not pay for one machine: .*; ",
    ):
        check(max_usd_per_hour=3.5)


def test_a_budget_must_pay_for_as_many_machines_as_the_job_wants(workdir: Path) -> None:
    def check(**budget: float) -> None:
        submit.check_budget(
            config_for(
                workdir,
                budget=budget,
                local=zone(3.0),
                resources={"min_vms": 4, "max_vms": 4},
            )
        )

    check(max_usd_per_hour=12.0)
    told = r"max_usd_per_hour: 7.0 does not pay for 4 machines \(resources.min_vms\)"
    with pytest.raises(BudgetError, match=told):
        check(max_usd_per_hour=7.0)
    with pytest.raises(BudgetError, match=r"for 4 machines .* of the cheapest, 300 s"):
        check(max_usd=0.5)


@given(price=st.floats(0, 100), budget=st.floats(1e-6, 100))
def test_a_budget_that_pays_for_the_cheapest_machine_is_accepted(
    price: float, budget: float
) -> None:
    config = config_for(Path("/"), budget={"max_usd": budget}, local=zone(price))
    kept_s = reserve_s(config.manager.lease_s)
    if Money.allowed(budget) >= Rate.of(price).over(kept_s + WORTH_S):
        submit.check_budget(config)
    else:
        with pytest.raises(BudgetError):
            submit.check_budget(config)
