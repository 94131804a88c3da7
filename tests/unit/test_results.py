"""docs/results.md holds what ``scripts/bench papers`` prints."""

from __future__ import annotations

from pathlib import Path

from tests.bench import papers_others
from tests.bench.bench_papers import table

PAGE = Path(__file__).resolve().parents[2] / "docs/results.md"


def test_rows_of_equations_and_closed_forms_are_in_the_page() -> None:
    """Varuna's rows take the planner 20 seconds: the bench alone prints them."""
    page = PAGE.read_text().splitlines()
    missing = [line for line in table(list(papers_others.rows())) if line not in page]
    assert missing == []
