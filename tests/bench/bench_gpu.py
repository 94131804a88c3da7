"""The first fifteen minutes with a GPU: what is worth most comes first.

    scripts/first-gpu --out FOLDER [--seconds 570] [--only launch,bits] [--again]

Each step is a process of its own with a limit of its own. Its result is a line of
``results.jsonl`` in the folder as soon as there is one, and a paragraph of ``log.txt``. Called
again with the same folder it goes on where it was cut off: steps that have a line are left
out, also those that failed, unless ``--again`` is given. At the end the tables are printed
that docs/gpu.md wants, of all results in the folder.

The machine needs Python 3.11 or newer, torch with CUDA, numpy, safetensors and
nvidia-ml-py, for ``smoke`` also pytest, pytest-timeout, pytest-xdist and hypothesis, and what
``spottrain launch`` needs. Nothing is installed or downloaded; packages that the machine lacks
can be put on PYTHONPATH. With ``SPOTTRAIN_TEST_DEVICE=deferred:7`` everything runs on the
stand-in for a GPU, small; what only hardware can show is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.processes import ROOT
from tests.gpu.devices import NoGpuError, device_name, is_gpu

from spottrain import children

_SPEED = "tests.gpu.speed"
_SMALL_SIZES = "--microbatch 2 --minibatch 8 --turns 1 --steps 1"
_SMALL = f"small {_SMALL_SIZES}"
_SLOWER = 20
_LEAST_S = 10.0
"""With less time left no step begins."""


@dataclass(frozen=True)
class Step:
    """One measurement."""

    asks: str
    """What it is to show."""
    command: str
    """Module and arguments on a GPU."""
    seconds: float
    """On a GPU; a stand-in may run on a slow machine."""
    small: str = ""
    """On a stand-in; empty: it cannot show that."""

    @property
    def limit_s(self) -> float:
        """Return how long it may take here."""
        return self.seconds * (1 if is_gpu(device_name()) else _SLOWER)


STEPS = {
    "context": Step("On what is all this measured?", "tests.gpu.context", 20, "tests.gpu.context"),
    "launch": Step(
        "Does a job train from the command line to its end?",
        "tests.gpu.launched tiny --steps 40",
        60,
        "tests.gpu.launched tiny --steps 4 --stand-in H100 --numbers",
    ),
    "launch_124m": Step(
        "How long until the first mini-batch of GPT-2 124M, with the defaults?",
        "tests.gpu.launched gpt2_124m --minibatch 64 --steps 10",
        75,
        "tests.gpu.launched gpt2_124m --minibatch 64 --steps 10 --stand-in H100",
    ),
    "smoke": Step(
        "Do the tests of the folder pass?",
        "pytest -q -n 6 tests/gpu -k 'trains or told or unfit or watch or precisions'",
        80,
    ),
    "speed_1558m": Step(
        "How fast is each way to train GPT-2 1.5B, beside a loop written by hand?",
        f"{_SPEED} gpt2_1558m --microbatch 4 --minibatch 128 --turns 1 --steps 1 --apart --predict "
        "--variants plain,fast_device,fast_host,exact_device",
        180,
        f"{_SPEED} {_SMALL} --apart --predict --variants plain,fast_device,fast_host,exact_device",
    ),
    "speed_124m": Step(
        "The same of GPT-2 124M; is what calibration predicts within 5 %?",
        f"{_SPEED} gpt2_124m --microbatch 16 --minibatch 512 --turns 1 --steps 2 --predict "
        "--variants plain,fast_device,exact_device,fast_recompute",
        60,
        f"{_SPEED} {_SMALL} --predict --variants plain,fast_device,exact_device,fast_recompute",
    ),
    "small_minibatches": Step(
        "What does a mini-batch cost beyond its computing?",
        f"{_SPEED} gpt2_124m --microbatch 16 --minibatch 64 --turns 1 --steps 6 "
        "--variants plain,fast_device,exact_device",
        45,
        f"{_SPEED} {_SMALL} --variants plain,fast_device",
    ),
    "compiled": Step(
        "What does torch.compile bring, to a loop written by hand and to ours?",
        f"{_SPEED} gpt2_124m_compiled --microbatch 16 --minibatch 512 --turns 1 --steps 2 "
        "--variants plain,fast_device",
        60,
        f"{_SPEED} small_compiled {_SMALL_SIZES} --variants plain,fast_device",
    ),
    "commit": Step(
        "What does each piece of a commit take, and locking and moving the host's memory?",
        "tests.gpu.commit_parts gpt2_1558m --sections 8",
        70,
        "tests.gpu.commit_parts small --sections 2 --gigabytes 0.01",
    ),
    "two_stages": Step(
        "Is the prediction right where stages send to each other?",
        f"{_SPEED} gpt2_124m --stages 2 --microbatch 8 --minibatch 128 --turns 1 --steps 2 "
        "--predict --variants fast_device",
        60,
        f"{_SPEED} {_SMALL} --stages 2 --predict --variants fast_device",
    ),
    "links": Step(
        "How fast are messages and all-reduces, and how soon is a killed peer noticed?",
        "tests.gpu.broken_peers --mb 6,13,25 --reduce-mb 100 --kills 3 --seconds 40",
        50,
        "tests.gpu.broken_peers --mb 1,2 --reduce-mb 10 --kills 1",
    ),
    "evacuation": Step(
        "How long do 25 GB take beside a kernel that hangs?",
        "tests.gpu.evacuation --mib 25600 --hang-s 30",
        110,
        "tests.gpu.evacuation --mib 16 --hang-s 2",
    ),
    "nccl": Step(
        "What do two ranks' start, sums and abort take, in time and memory?",
        "tests.gpu.nccl_alone --mb 64 --hang-s 8 --ranks 2",
        60,
        "tests.gpu.nccl_alone --mb 1 --hang-s 1 --ranks 2",
    ),
    "bits": Step(
        "Does GPT-2 124M end with the same bits at 1x1 and 2x1?",
        "tests.gpu.exactness --job gpt2_124m --homes device --shapes 1x1,2x1 --seconds 60",
        75,
        "tests.gpu.exactness --job small --homes device --shapes 1x1,2x1",
    ),
    "morph": Step(
        "Does a job go on after a killed worker and a killed VM?",
        "tests.gpu.launched gpt2_124m --minibatch 64 --microbatch 8 --steps 60 --vms 3 "
        "--kills worker:10,vm:20",
        150,
    ),
}
"""In this order: what later decisions need first comes first."""


def run(step: Step, seconds: float) -> dict[str, Any]:
    """Run a step; return its result, or why there is none."""
    if not is_gpu(device_name()) and not step.small:
        return {"skipped": f"{device_name()} cannot show it: needs a real GPU"}
    command = step.command if is_gpu(device_name()) else step.small
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    argv = [sys.executable, "-m", *shlex.split(command)]
    began_s, late, code = time.monotonic(), "", 0
    written: tuple[bytes | None, bytes | None]
    try:
        done = children.run(argv, env=environment, timeout_s=seconds)
        code, written = done.returncode, (done.stdout, done.stderr)
    except subprocess.TimeoutExpired as error:
        late, written = f"took more than {seconds:.0f} s", (error.stdout, error.stderr)
    out, errors = ((text or b"").decode(errors="replace") for text in written)
    lines = out.splitlines()
    found = [line for line in lines if line.startswith("{")]
    result: dict[str, Any] = json.loads(found[-1]) if found else {}
    if not found and lines and not (late or code):
        result["said"] = lines[-1]  # of pytest
    if late or code:
        result["error"] = f"{late or f'exit code {code}'}; {(out + errors)[-2000:]}"
    return {**result, "took_s": time.monotonic() - began_s}


# --- what is kept -----------------------------------------------------------------------


class Results:
    """The results in a folder.

    Args:
        folder: Made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines, self._log = folder / "results.jsonl", folder / "log.txt"
        self.found: dict[str, dict[str, Any]] = {}
        """By step; the newest of each."""
        text = self._lines.read_text() if self._lines.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):  # else it was cut off
                self._take(json.loads(line))
        if text and not text.endswith("\n"):
            self._lines.write_text(text[: text.rfind("\n") + 1])

    def _take(self, row: dict[str, Any]) -> None:
        self.found[row.pop("step")] = row

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        """Keep a step's result."""
        with self._lines.open("a") as file:
            file.write(json.dumps({"step": name, **result}) + "\n")
        self._take({"step": name, **result})
        with self._log.open("a") as file:
            file.write("\n".join(summary(name, result)) + "\n\n")


def tables(results: Mapping[str, dict[str, Any]]) -> Iterable[str]:
    """Yield the results as Markdown."""
    for name, result in results.items():
        if variants := result.get("variants"):
            yield from speed_table(name, result, variants)
    for name, result in results.items():
        yield ""
        yield from summary(name, result)


def speed_table(name: str, result: Mapping[str, Any], variants: Mapping[str, Any]) -> Iterable[str]:
    """Yield the table of a model's variants."""
    batches = f"micro-batch {result['microbatch']}, mini-batch {result['minibatch']}"
    yield f"\n### {name}: {result['job']}, {batches}\n"
    yield "| variant | median, s | tokens/s | MFU | of plain | peak, GB |"
    yield "|---|---|---|---|---|---|"
    for variant, one in variants.items():
        peak = one["peak_bytes"]
        yield (
            f"| {variant} | {one['median_s']:.3f} | {one['tokens_per_s']:,.0f} | "
            f"{one.get('mfu', 0.0):.1%} | {one.get('of_plain', 0.0):.3f} | "
            f"{'-' if peak is None else f'{peak / 1e9:.2f}'} |"
        )


def summary(name: str, result: Mapping[str, Any]) -> Iterable[str]:
    """Yield what a step has found, a line for each value."""
    took = f", {result['took_s']:.0f} s" if "took_s" in result else ""
    yield f"### {name}{took}: {STEPS[name].asks}"
    for key, value in result.items():
        if key not in ("took_s", "variants"):
            yield f"- {key}: {value if isinstance(value, str) else json.dumps(value)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, keep, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("first-gpu"))
    parser.add_argument("--only", default=",".join(STEPS), help="names of steps")
    parser.add_argument("--again", action="store_true", help="also those that are done")
    parser.add_argument("--seconds", type=float, default=570.0, help="for everything")
    chosen = parser.parse_args(arguments)
    try:
        device_name()
    except NoGpuError as error:
        print(f"nothing measured: {error}")
        return
    end_s = time.monotonic() + chosen.seconds
    results = Results(chosen.out)
    for name in chosen.only.split(","):
        if name in results.found and not chosen.again:
            continue
        if (left_s := end_s - time.monotonic()) < _LEAST_S:
            print(f"{name}: no time left; call this again", file=sys.stderr)
            break
        results.add(name, run(STEPS[name], min(STEPS[name].limit_s, left_s)))
        print(f"{name}: {_outcome(results.found[name])}", file=sys.stderr, flush=True)
    for line in tables(results.found):
        print(line)


def _outcome(result: Mapping[str, Any]) -> str:
    told = result.get("skipped") or result.get("error") or "done"
    return f"{result.get('took_s', 0.0):.0f} s, {str(told)[:300]}"


if __name__ == "__main__":
    main()
