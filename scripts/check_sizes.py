"""The size budgets: a file of at most 400 lines, a function of at most 40.

A function counts from its ``def`` to its end, without its docstring and the functions
inside it. What may be larger stands in sizes-allowed.txt, with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 40
FOLDERS = (
    "cloud",
    "morphing",
    "pipeline",
    "pricing",
    "varuna_manager",
    "src",
    "scripts",
    "tests",
    "examples",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function below ``node`` with its dotted name."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, Function | ast.ClassDef):
            inner = f"{prefix}{child.name}."
        if isinstance(child, Function):
            yield prefix + child.name, child
        yield from functions(child, inner)


def span(node: ast.stmt) -> int:
    """Return the lines from the first to the last of ``node``."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def function_lines(function: Function) -> int:
    """Return the lines of a function that count."""
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    inner = (f for name, f in functions(function) if "." not in name)
    return span(function) - documented * span(first) - sum(map(span, inner))


def too_large(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (place, lines, limit) of every file and function over its budget."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8")
            if (lines := len(text.splitlines())) > FILE_LINES:
                yield name, lines, FILE_LINES
            for function, node in functions(ast.parse(text)):
                if (lines := function_lines(node)) > FUNCTION_LINES:
                    yield f"{name}:{function}", lines, FUNCTION_LINES


def read_allowed(path: Path) -> dict[str, int]:
    """Return the allowed lines by place; each entry must give its reason."""
    allowed = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry, _, reason = line.partition("#")
        if not entry.strip():
            continue
        place, lines = entry.split()
        if not reason.strip():
            raise SystemExit(f"{path.name}: {place}: give the reason after a #")
        allowed[place] = int(lines)
    return allowed


def check(root: Path) -> list[str]:
    """Return what is wrong, a line each."""
    allowed = read_allowed(root / "scripts" / "sizes-allowed.txt")
    large = list(too_large(root))
    wrong = [
        f"{place}: {lines} lines, at most {allowed.get(place, limit)}"
        for place, lines, limit in large
        if lines > allowed.get(place, limit)
    ]
    stale = sorted(allowed.keys() - {place for place, _, _ in large})
    return wrong + [f"{place}: needs no allowance any more" for place in stale]


if __name__ == "__main__":
    found = check(Path(__file__).resolve().parents[1])
    sys.stdout.write("\n".join(found or ["all files and functions within budget"]))
    sys.stdout.write("\n")
    sys.exit(bool(found))
