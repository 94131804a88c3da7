"""Checks the structural rules that no linter covers; CONTRIBUTING.md lists them.

    file       at most 800 lines (a note from 500 on)
    folder     at most 25 modules, not counting ``__init__`` and ``__main__``
    prefix     three modules of a folder that share one go into a folder of their own
    circle     modules import each other, even if only for type checking
    class      a public class name is unique within a top-level folder
    word       a term of the design names one class in the whole project
    crumb      under 80 lines with functions, and one importer, which is in its folder
    base       a base class whose only subclass is in another module of its folder

Exceptions are listed in structure-allowed.txt: rule, place, reason.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

FOLDERS = ("cloud", "morphing", "pipeline", "pricing", "varuna_manager")
"""The product's top-level folders; what lies in src/spottrain itself is a sixth."""
OTHERS = ("scripts", "tests", "examples", "lab")
"""Held to the sizes only."""
NOTED_LINES, FILE_LINES = 500, 800
MODULES, SHARING_A_PREFIX, CRUMB_LINES = 25, 3, 80
WORDS = frozenset(
    {
        "Plan",
        "Place",
        "Decision",
        "Outcome",
        "Terms",
        "Supervisor",
        "Offer",
        "Vm",
        "Worker",
        "Agent",
        "Manager",
        "Profile",
        "Section",
        "Stage",
        "Replica",
        "Generation",
        "Slot",
        "Rank",
        "Morph",
        "Tracer",
    }
)


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python file of the product."""

    name: str
    """As it is imported."""
    path: Path
    tree: ast.Module
    lines: int

    @property
    def folder(self) -> str:
        """The package it lies in."""
        is_package = self.path.name == "__init__.py"
        return self.name if is_package else self.name.rpartition(".")[0]

    @property
    def top(self) -> str:
        """Its top-level folder, such as ``cloud``."""
        first = self.name.split(".")[1:2]
        return first[0] if first and first[0] in FOLDERS else "src"

    def classes(self) -> Iterator[ast.ClassDef]:
        """Yield the classes at its top level."""
        return (node for node in self.tree.body if isinstance(node, ast.ClassDef))


@dataclass(frozen=True, order=True)
class Breach:
    """A rule that is broken somewhere."""

    rule: str
    place: str
    what: str


def read_modules(root: Path) -> dict[str, Module]:
    """Return the product's modules by name."""
    files = [(path, path.relative_to(root)) for f in FOLDERS for path in rglob(root, f)]
    package = root / "src" / "spottrain"
    for path in rglob(root, "src/spottrain"):
        below = path.relative_to(package)
        if below.parts[0] not in FOLDERS:  # those are links to the top-level folders
            files.append((path, below))
    modules = {}
    for path, below in files:
        parts = ("spottrain", *below.with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, ast.parse(text), len(text.splitlines()))
    return modules


def rglob(root: Path, folder: str) -> list[Path]:
    """Return the Python files below a folder."""
    return sorted((root / folder).rglob("*.py"))


def imports_of(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """Return the modules of the product that one imports anywhere in its text."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in modules else node.module)
    return found & modules.keys() - {module.name}


# --- sizes ------------------------------------------------------------------------------


def too_large(path: Path, place: str) -> Iterator[Breach]:
    """Yield what is larger than it may be in a file."""
    text = path.read_text(encoding="utf-8")
    if (lines := len(text.splitlines())) > FILE_LINES:
        yield Breach("file", place, f"{lines} lines, at most {FILE_LINES}")


# --- folders ----------------------------------------------------------------------------


def crowded(modules: Mapping[str, Module]) -> Iterator[Breach]:
    """Yield folders with too many modules, and families that should be folders."""
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        if not module.path.name.startswith("__"):
            folders[module.folder].append(module.path.stem)
    for folder, names in folders.items():
        if len(names) > MODULES:
            yield Breach("folder", folder, f"{len(names)} modules, at most {MODULES}")
        for prefix, number in Counter(name.split("_")[0] for name in names).items():
            if number >= SHARING_A_PREFIX:
                what = f"{number} modules begin with it: make it a folder"
                yield Breach("prefix", f"{folder}.{prefix}", what)


def circles(graph: Mapping[str, set[str]]) -> Iterator[Breach]:
    """Yield the first circle of imports that is found."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        yield Breach("circle", circle[0], " -> ".join(circle))


def crumbs(modules: Mapping[str, Module], graph: Mapping[str, set[str]]) -> Iterator[Breach]:
    """Yield modules that are too small to stand alone."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, imported in graph.items():
        for other in imported:
            importers[other].add(name)
    for name, module in modules.items():
        users = importers[name]
        if (
            module.lines < CRUMB_LINES
            and not module.path.name.startswith("__")
            and any(isinstance(node, Function) for node in module.tree.body)
            and len(users) == 1
            and modules[next(iter(users))].folder == module.folder
        ):
            what = f"{module.lines} lines, used by {next(iter(users))} alone: merge them"
            yield Breach("crumb", name, what)


# --- classes ----------------------------------------------------------------------------


def repeated(modules: Mapping[str, Module]) -> Iterator[Breach]:
    """Yield class names that stand twice in a top-level folder, or in the house."""
    places: defaultdict[str, list[Module]] = defaultdict(list)
    for module in modules.values():
        for node in module.classes():
            if not node.name.startswith("_"):
                places[node.name].append(module)
    for name, found in places.items():
        where = ", ".join(module.name for module in found)
        if name in WORDS and len(found) > 1:
            yield Breach("word", name, where)
        for top, number in Counter(module.top for module in found).items():
            if number > 1:
                yield Breach("class", f"{top}.{name}", where)


def base_names(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's bases, without their modules."""
    return [ast.unparse(base).rpartition(".")[2] for base in node.bases]


def lone_bases(modules: Mapping[str, Module]) -> Iterator[Breach]:
    """Yield base classes whose only subclass is in another module of their folder."""
    subclasses: defaultdict[str, list[tuple[str, Module]]] = defaultdict(list)
    for module in modules.values():
        for node in module.classes():
            for base in base_names(node):
                subclasses[base].append((node.name, module))
    for module in modules.values():
        for node in module.classes():
            found = subclasses[node.name]
            if (
                len(found) == 1
                and found[0][1] is not module
                and found[0][1].folder == module.folder
                and "Protocol" not in base_names(node)
                and not node.name.endswith("Error")
            ):
                place = f"{module.name}.{node.name}"
                yield Breach("base", place, f"only {found[0][0]} derives from it")


# --- the whole --------------------------------------------------------------------------


def breaches(root: Path) -> list[Breach]:
    """Return every breach of a rule below a checkout's folder."""
    modules = read_modules(root)
    graph = {name: imports_of(module, modules) for name, module in modules.items()}
    found = [*crowded(modules), *circles(graph), *crumbs(modules, graph)]
    found += [*repeated(modules), *lone_bases(modules)]
    for path in (
        *(module.path for module in modules.values()),
        *(path for folder in OTHERS for path in rglob(root, folder)),
    ):
        found += too_large(path, path.relative_to(root).as_posix())
    return sorted(found)


def read_allowed(path: Path) -> set[tuple[str, str]]:
    """Return (rule, place) of what is allowed; each must give its reason."""
    allowed = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        entry, _, reason = line.partition("#")
        if not entry.strip():
            continue
        rule, place = entry.split()
        if not reason.strip():
            raise SystemExit(f"{path.name}: {place}: give the reason after a #")
        allowed.add((rule, place))
    return allowed


def check(root: Path) -> list[str]:
    """Return what is wrong, a line each."""
    allowed = read_allowed(root / "scripts" / "structure-allowed.txt")
    found = breaches(root)
    wrong = [
        f"{breach.rule}: {breach.place}: {breach.what}"
        for breach in found
        if (breach.rule, breach.place) not in allowed
    ]
    stale = sorted(allowed - {(breach.rule, breach.place) for breach in found})
    return wrong + [f"{rule}: {place}: needs no allowance" for rule, place in stale]


def main() -> int:
    """Print what is wrong, and which files grow long; 1 if anything is wrong."""
    root = Path(__file__).resolve().parents[1]
    for module in read_modules(root).values():
        if NOTED_LINES < module.lines <= FILE_LINES:
            path = module.path.relative_to(root)
            sys.stdout.write(f"note: {path}: {module.lines} lines, consider a split\n")
    wrong = check(root)
    sys.stdout.write("\n".join(wrong or ["all structural rules hold"]) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
