"""What starts often, or on VMs, imports little: each entry in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

# A fork of a process that has imported nothing of ours imports it for each entry.
PROGRAM = """
import json, os, sys
before = set(sys.modules)
loaded = {}
for code in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        exec(code)
        with open(write, "w") as out:
            json.dump(sorted(sys.modules.keys() - before), out)
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        loaded[code] = json.load(answer)
print(json.dumps(loaded))
"""
STANDARD_LIBRARY_ALONE = (
    "import spottrain",
    "import spottrain.pickled",
    "import spottrain.wire.messages, spottrain.manifest",
    "import spottrain.cloud, spottrain.cloud.port.provider, spottrain.cloud.port.errors",
    "import spottrain.cloud.notices.hear",
    "import spottrain.varuna_manager.agent.main",
    "from spottrain.storage.open import open_store; open_store('/tmp/x')",
)
WITHOUT = {
    "from spottrain import launch": ("torch", "boto3", "pandas", "scipy", "cloudpickle"),
    "import spottrain.varuna_manager.cli.main": ("torch", "boto3", "transformers"),
    "import spottrain.varuna_manager.cli.status": (
        "numpy",
        "spottrain.morphing.plan.choose",
        "spottrain.varuna_manager.config.job",
    ),
    "import spottrain.varuna_manager.tracking.main": ("torch", "pydantic"),
    "import spottrain.varuna_manager.cli.ui": ("torch", "boto3", "scipy", "pandas"),
    "from spottrain.cloud.aws.provider import AwsProvider as P\n"
    "from spottrain.cloud.aws.settings import AwsSettings as S\n"
    "P(S(instance_types=()), None, None)": ("boto3", "botocore"),
    "from spottrain.cloud.azure.provider import AzureProvider as P\n"
    "from spottrain.cloud.azure.settings import AzureSettings as S\n"
    "P(S(instance_types=()), None)": ("azure", "msal"),
    "from spottrain.cloud.gcp.provider import GcpProvider as P\n"
    "from spottrain.cloud.gcp.settings import GcpSettings as S\n"
    "P(S(project='p', instance_types=()), None, None)": ("google", "requests"),
}


@cache
def loaded() -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([*STANDARD_LIBRARY_ALONE, *WITHOUT]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    modules: dict[str, list[str]] = json.loads(done.stdout)
    return modules


@pytest.mark.parametrize("code", STANDARD_LIBRARY_ALONE)
def test_it_needs_the_standard_library_alone(code: str) -> None:
    packages = {name.partition(".")[0] for name in loaded()[code]}
    assert packages - sys.stdlib_module_names == {"spottrain"}


@pytest.mark.parametrize("code", WITHOUT)
def test_it_imports_none_of(code: str) -> None:
    modules = loaded()[code]
    assert "spottrain" in modules
    found = {name for name in WITHOUT[code] for m in modules if f"{m}.".startswith(f"{name}.")}
    assert found == set()
