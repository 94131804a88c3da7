"""Prints the lines of code of the product, by room.

Lines of code are those with something else than a docstring, a comment, an import or a
lone bracket. Formatting so counts little, and prose not at all.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "spottrain"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_BRACKETS = frozenset("()[]{},:")


def code_lines(text: str) -> int:
    """Return the number of lines of code in a module."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE and token.string not in _BRACKETS:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def room_of(path: Path) -> str:
    """Return the folder that a module of the package belongs to, such as ``cloud/aws``."""
    folders = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(folders[:2]) or "."


def modules_of(package: Path) -> list[Path]:
    """Return the Python files of the package; its rooms are links to top-level folders."""
    rooms = (one for one in package.iterdir() if one.is_dir())
    files = (file for room in rooms for file in room.rglob("*.py"))
    return sorted((*package.glob("*.py"), *files))


def main() -> int:
    """Print a line for each room and for all."""
    total, prose, modules = Counter[str](), Counter[str](), Counter[str]()
    for path in modules_of(PACKAGE):
        text, room = path.read_text(encoding="utf-8"), room_of(path)
        for name in {room, room.partition("/")[0], "all"}:
            total[name] += code_lines(text)
            prose[name] += len(text.splitlines())
            modules[name] += 1
    rows = [f"{'room':<28}{'modules':>8}{'lines':>9}{'code':>8}"]
    for name in sorted(total):
        counts = f"{modules[name]:>8,}{prose[name]:>9,}{total[name]:>8,}"
        rows.append(f"{name:<28}{counts}")
    sys.stdout.write("\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
