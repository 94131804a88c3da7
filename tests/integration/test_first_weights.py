"""Real supervisors write the first weights together."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.fleet import Fleet, Zygote
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.manifest import read_manifest
from spottrain.storage.open import open_store
from spottrain.wire import messages


def hashes(spec: messages.JobSpec, name: str) -> list[str]:
    manifest = read_manifest(open_store(spec.checkpoint_path), name)
    return [file.sha256 for file in manifest.files]


@pytest.mark.parametrize("names", ["abc", pytest.param("abcdef", marks=pytest.mark.rotated)])
def test_any_number_of_vms_write_the_same_bits(zygote: Zygote, tmp_path: Path, names: str) -> None:
    spec = job_spec(tmp_path)
    with Fleet(spec, names, tmp_path / "log", zygote) as fleet:
        fleet.ready()
        alone = fleet.initialise()
        together = fleet.initialise(names, number=-2)

        assert hashes(spec, together) == hashes(spec, alone)
        told = [
            (vm, report.section)
            for vm, report in fleet.history
            if isinstance(report, messages.SectionPrepared) and report.generation == -2
        ]
        assert sorted(section for _, section in told) == list(range(NUM_SECTIONS))
        assert len({vm for vm, _ in told}) == min(NUM_SECTIONS, len(names))
