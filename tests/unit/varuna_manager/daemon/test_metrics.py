from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.builders import checkpoint_saved
from tests.fakes.gpus import use
from tests.unit.varuna_manager.core.test_deadline import rate
from tests.unit.varuna_manager.core.test_deadline import story as on_time
from tests.unit.varuna_manager.story import Story

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.daemon.metrics import JobMetrics

NAME = re.compile(
    r"spottrain_[a-z_]+(_total|_seconds|_dollars|_info|_bucket|_count|_sum|_created)?"
)


def scraped(state: State, now_s: float | None = None) -> dict[str, float]:
    """Return the samples by name and labels, as Prometheus parses them."""
    now_s = state.now_s if now_s is None else now_s
    text = JobMetrics(lambda: state, lambda: now_s).text().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            assert NAME.fullmatch(sample.name), sample.name
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_a_job_that_trains_shows_progress_money_and_vms() -> None:
    story = Story(max_usd=10.0, max_usd_per_hour=3.6).training("a", "b")
    story.report("a", checkpoint_saved(3))
    found = scraped(story.state, story.now_s + 3600.0)
    assert found["spottrain_job_phase{spottrain_job_phase=active}"] == 1
    assert found["spottrain_job_phase{spottrain_job_phase=ended}"] == 0
    assert found["spottrain_step"] == 3
    assert found["spottrain_steps"] == 100
    assert found["spottrain_minibatches_total"] == 3
    assert found["spottrain_examples_total"] == 24
    assert found["spottrain_examples_per_second"] == pytest.approx(8.0)
    assert found["spottrain_loss"] == pytest.approx(4.97)
    vms = "cloud=local,instance_type=t,market=spot,phase=ready"
    assert found[f"spottrain_vms{{{vms}}}"] == 2
    assert found["spottrain_spent_dollars_total"] > 2.0
    assert found["spottrain_spend_rate_dollars_per_second"] == pytest.approx(2 / 3600)
    assert found["spottrain_budget_dollars"] == 10.0
    assert found["spottrain_spent_gpu_seconds_total"] == pytest.approx(
        3600 * found["spottrain_spent_dollars_total"]
    ), "two VMs of one GPU for a dollar an hour"
    assert "spottrain_budget_gpu_seconds" not in found
    assert found["spottrain_spend_rate_cap_dollars_per_second"] == pytest.approx(0.001)
    assert found["spottrain_checkpoint_step"] == 3
    assert found["spottrain_checkpoint_timestamp_seconds"] == story.now_s
    assert "spottrain_deadline_slack_seconds" not in found, "there is no deadline"
    assert found["spottrain_journal_write_seconds_count"] == 0


def test_interruptions_recoveries_and_morphs_are_counted() -> None:
    story = Story().training("a", "b", "c", "d")
    story.tell(e.VmLost, vm_id="d", reason="gone")
    story.broken("a", "b", "c")
    found = scraped(story.state)
    assert found["spottrain_interruptions_total{kind=kill}"] == 1
    assert found["spottrain_interruptions_total{kind=notice}"] == 0
    assert found["spottrain_recoveries_total"] == 1
    assert found["spottrain_morphs_total"] == 0
    story = Story().training("a", "b")
    story.tell(e.ManagerStarted, software_version="2", pid=2)
    story.stopped(3)
    assert scraped(story.state)["spottrain_morphs_total"] == 1


def test_a_name_cannot_break_the_format() -> None:
    state = Story().state
    spec = replace(state.job.spec, name='a"\n\\b')
    state = replace(state, settings=replace(state.job, spec=spec))
    assert any('a"\n\\b' in name for name in scraped(state))


def test_what_is_unknown_is_left_out() -> None:
    assert "spottrain_loss" not in scraped(Story().state)
    assert "spottrain_step" not in scraped(State())


def test_gpus_are_shown_as_far_as_their_drivers_say() -> None:
    story, gpus = Story().training("a", "b"), {"a": (use(1, temperature_c=None),)}
    text = JobMetrics(lambda: story.state, lambda: story.now_s, lambda: gpus).text()
    shown = [line for line in text.decode().splitlines() if line.startswith("spottrain_gpu")]
    assert shown == [
        'spottrain_gpu_utilisation_ratio{gpu="1",vm="a"} 0.97',
        'spottrain_gpu_memory_used_bytes{gpu="1",vm="a"} 3e+09',
        'spottrain_gpu_power_watts{gpu="1",vm="a"} 151.2',
    ]


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    story = on_time(1e4, max_usd=10.0, max_usd_per_hour=30.0)
    rate(story)
    story.report("a", checkpoint_saved(3))
    gpus = {"a": (use(),)}
    text = JobMetrics(lambda: story.state, lambda: story.now_s, lambda: gpus).text()
    families = text_string_to_metric_families(text.decode())
    there = {sample.name: sample.labels for family in families for sample in family.samples}
    board = json.loads((Path(__file__).parents[4] / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"spottrain_\w+", expr)}
    assert names - there.keys() == set()
    assert len(names) > 20
    for panel in board["panels"]:
        for target in panel["targets"]:
            (name, *_) = re.findall(r"spottrain_\w+", target["expr"])
            labels = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert set(labels) <= there[name].keys(), target
