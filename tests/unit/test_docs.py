"""What the documentation names is there."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TELL_OF_THE_PAST = ("CHANGELOG.md", "decisions.md")
FOLDERS = "cloud|morphing|pipeline|pricing|varuna_manager|src|scripts"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in TELL_OF_THE_PAST],
    ids=lambda page: page.name,
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS}|tests)/[\w/]*\.py)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pictures_are_small_and_shown() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    }
    pictures = set((ROOT / "docs" / "pictures").iterdir())
    assert pictures - shown == set()
    assert [path.name for path in pictures if path.stat().st_size > 200_000] == []


def test_insides_of_other_packages_that_we_use_are_there() -> None:
    page = (ROOT / "docs" / "processes.md").read_text()
    _, _, section = page.partition("## Insides of other packages")
    names = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    assert names
    for name in names:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("name", ["nanogpt", "finetune_hf"])
def test_a_job_has_fewer_lines_than_the_script_it_replaces(name: str) -> None:
    def lines(path: str) -> int:
        text = (ROOT / "examples" / path).read_text()
        return len(re.findall(r"^(?!\s*(#.*)?$).+", text, re.MULTILINE))

    told = (ROOT / "docs" / "training.md").read_text()
    plain, job, file = (f"plain/{name}.py", f"{name}.py", f"{name}.yaml")
    for path in (plain, job, file):
        assert f"examples/{path}:{lines(path)}\n" in told
    assert lines(job) + lines(file) < lines(plain)
