"""The papers' results beside ours: the tables of docs/results.md, without hardware."""

from __future__ import annotations

from tests.bench import papers_others, papers_planner, papers_varuna
from tests.bench.papers_varuna import Row


def text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def ratio(row: Row) -> str:
    """Ours over the paper's; of words whether they are the same."""
    if isinstance(row.paper, str) or isinstance(row.ours, str):
        return "same" if row.paper == row.ours else ""
    return f"{row.ours / row.paper:.3f}"


def table(rows: list[Row]) -> list[str]:
    lines = ["| what | | paper | ours | ratio | why |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (
            f"{row.source}: {row.what}",
            row.kind,
            text(row.paper),
            text(row.ours),
            ratio(row),
            row.why,
        )
        lines.append("| " + " | ".join(cells).rstrip() + " |")
    return lines


def main() -> None:
    for title, found in (
        ("Varuna", papers_varuna.rows()),
        ("The dissertation, VirtualFlow, dynamic batching", papers_others.rows()),
    ):
        rows = list(found)
        print(f"### {title}\n")
        for line in table(rows):
            print(line)
        errors = [
            abs(float(row.ours) / float(row.paper) - 1)
            for row in rows
            if row.kind == "predicted" and not isinstance(row.paper, str)
        ]
        print(f"\n{len(errors)} predicted numbers: median difference ", end="")
        print(f"{sorted(errors)[len(errors) // 2]:.1%}, largest {max(errors):.1%}.\n")
    print("### PTD-P's tensor and pipeline sizes, by the planner's simulation\n")
    for line in table(list(papers_planner.rows())):
        print(line)


if __name__ == "__main__":
    main()
