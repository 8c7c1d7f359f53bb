"""The rules of the house, each a function from source files to sentences about what breaks it."""

import ast
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

# Floors of DESIGN.md. A room may import rooms of lower floors only; mpu not even those.
FLOORS = {
    "base": -1,
    "mpu": 0,
    "tokenizer": 0,
    "data": 0,
    "model": 1,
    "pipeline": 1,
    "optimizer": 1,
    "checkpointing": 2,
    "training": 3,
    "tasks": 4,
    "parity": 4,
    "planner": 4,
}
# Rooms that may import only these packages besides the standard library; rooms that may not import those.
ONLY = {"base": frozenset[str](), "mpu": frozenset({"torch"})}
NEVER = {"tokenizer": frozenset({"torch"})}
_IMPORTING_CALLS = ("import_module", "importlib.import_module", "__import__")
# Packages whose name on the index is not the name that is imported.
DISTRIBUTIONS = {"yaml": "pyyaml", "zlib_ng": "zlib-ng"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python file: its path from the repository's root, and what it holds."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.path)

    @property
    def room(self) -> str | None:
        """`base` for `megatron/base/files.py`; the file's own name right under megatron/; None outside megatron/."""
        parts = Path(self.path).with_suffix("").parts
        return parts[1] if parts[0] == "megatron" else None


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module by its full name, and whether a missing one is caught."""

    module: str
    line: int
    tried: bool = False

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.module.split(".")[0]


def read_sources(root: Path, *patterns: str) -> list[Source]:
    """The Python files below `root` that match glob patterns, in order of their paths."""
    found = {path for pattern in patterns for path in root.glob(pattern)}
    return [Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in sorted(found)]


def imports_of(source: Source) -> list[Import]:
    """Every import in the file, wherever it stands: in functions, under conditions, relative, or by import_module."""
    tree = source.tree
    tried = {id(node) for block in ast.walk(tree) if _catches_import_error(block) for node in ast.walk(block)}
    found = []
    for node in ast.walk(tree):
        for name in _imported_names(node, source.path):
            found.append(Import(name, node.lineno, id(node) in tried))  # type: ignore[attr-defined]
    return found


def _catches_import_error(node: ast.AST) -> bool:
    if not isinstance(node, ast.Try):
        return False
    caught = " ".join(ast.unparse(handler.type) if handler.type else "ImportError" for handler in node.handlers)
    return bool(re.search(r"\b(ImportError|ModuleNotFoundError|Exception|BaseException)\b", caught))


def _imported_names(node: ast.AST, path: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            folder = Path(path).parent.parts
            base = ".".join([*folder[: len(folder) - node.level + 1], *filter(None, [node.module])])
        yield base
        # `from megatron import mpu` imports the room, not only the empty package.
        if base == "megatron":
            yield from (f"megatron.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IMPORTING_CALLS:
        yield from (str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant))


def floor_problems(source: Source) -> list[str]:
    """Imports under megatron/ must point down: not up, not to another room of the same floor."""
    if source.room is None:
        return []
    problems = []
    for imported in imports_of(source):
        if imported.package in ("tools", "examples", "tests", "pretrain_gpt", "pretrain_bert"):
            problems.append(f"{source.path}:{imported.line} imports {imported.module}, which stands above it")
        parts = imported.module.split(".")
        if parts[0] != "megatron" or len(parts) == 1 or parts[1] == source.room:
            continue
        if source.room not in FLOORS or parts[1] not in FLOORS:
            problems.append(
                f"{source.path}:{imported.line} imports {imported.module}: no floor is known for one of them"
            )
        elif FLOORS[parts[1]] >= FLOORS[source.room]:
            problems.append(f"{source.path}:{imported.line} imports {imported.module}, which is not below it")
        elif source.room in ONLY:
            problems.append(f"{source.path}:{imported.line} imports {imported.module}; {source.room} stands alone")
    return problems


def outside_packages(source: Source) -> list[Import]:
    """Imports that are neither the standard library's nor this repository's own."""
    own = {"megatron", "tests", "tools", "examples", "setup", "pretrain_gpt", "pretrain_bert"}
    return [i for i in imports_of(source) if i.package not in own and i.package not in sys.stdlib_module_names]


def package_problems(source: Source) -> list[str]:
    """What a room may import from outside: base nothing, mpu torch alone, the tokenizer all but torch."""
    room = source.room or ""
    return [
        f"{source.path}:{i.line} imports {i.module}, which {room} may not need"
        for i in outside_packages(source)
        if (room in ONLY and i.package not in ONLY[room]) or i.package in NEVER.get(room, ())
    ]


def undeclared_problems(source: Source, declared: Iterable[str]) -> list[str]:
    """Packages that are imported, not merely tried, must be among those that setup.py installs."""
    names = {name.lower() for name in declared}
    return [
        f"{source.path}:{i.line} imports {i.module}, which setup.py does not install"
        for i in outside_packages(source)
        if not i.tried and DISTRIBUTIONS.get(i.package, i.package) not in names
    ]


def unused_problems(sources: Iterable[Source], declared: Iterable[str]) -> list[str]:
    """Every package that setup.py installs must be imported somewhere (`torch.utils.tensorboard` is tensorboard)."""
    used = set()
    for source in sources:
        for i in outside_packages(source):
            used |= {DISTRIBUTIONS.get(i.package, i.package), i.module.removeprefix("torch.utils.")}
    return [f"setup.py installs {name}, which nothing imports" for name in declared if name.lower() not in used]


def optional_problems(sources: Iterable[Source]) -> list[str]:
    """A package whose absence is caught is imported in that one file and nowhere else."""
    where: dict[str, set[str]] = {}
    tried: set[str] = set()
    for source in sources:
        for i in outside_packages(source):
            where.setdefault(i.package, set()).add(source.path)
            if i.tried:
                tried.add(i.package)
    return [
        f"{package} is optional and imported in {', '.join(sorted(where[package]))}: one file should try it"
        for package in sorted(tried)
        if len(where[package]) > 1 and package != "torch"
    ]


def has_main_guard(source: Source) -> bool:
    """Whether the file is written to be run: `if __name__ == "__main__"` at its top level."""
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'"
        for node in source.tree.body
    )


def argparse_problems(source: Source) -> list[str]:
    """Command lines are read at the edge: outside megatron/, in training/arguments.py, in modules run with -m."""
    if source.room is None or source.path == "megatron/training/arguments.py" or has_main_guard(source):
        return []
    return [f"{source.path}:{i.line} imports {i.module}" for i in imports_of(source) if i.package == "argparse"]


def docstring_problems(source: Source) -> list[str]:
    """A file begins by saying what lives in it, in a line that stands by itself."""
    text = ast.get_docstring(source.tree)
    if not text or not text.strip():
        return [f"{source.path}: the first statement is not a docstring that says what lives here"]
    first, *others = text.split("\n")
    runs_on = bool(others and others[0].strip())
    return [f"{source.path}: the first line of the docstring runs on: {first!r}"] if runs_on else []


def names_and_strings(source: Source) -> Iterator[tuple[str, int]]:
    """Every identifier and every string of the code, docstrings and comments left out."""
    tree = source.tree
    prose = {
        id(statement.value)
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value, line
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value, line


def cuda_problems(source: Source, allowed: Mapping[str, str]) -> list[str]:
    """Code names CUDA only in the files that `allowed` lists with a reason; the rest is told its device."""
    if source.path in allowed:
        return []
    return [
        f"{source.path}:{line} names CUDA: {word[:60]!r}"
        for word, line in names_and_strings(source)
        if re.search("cuda", word, re.IGNORECASE)
    ]


def unpickling_problems(source: Source) -> list[str]:
    """Nothing that is loaded can run code: no torch.load, no NumPy objects, no pickle and nothing of its kin."""
    kin = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    problems = [f"{source.path}:{i.line} imports {i.module}" for i in imports_of(source) if i.package in kin]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.serialization.load"):
            problems.append(f"{source.path}:{node.lineno} uses torch.load")
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.serialization"):
            problems += [f"{source.path}:{node.lineno} imports torch.load" for a in node.names if a.name == "load"]
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            problems.append(f"{source.path}:{node.value.lineno} allows NumPy to unpickle")
    return problems


# Written apart, so that this file does not break its own rule.
MACHINE_FOLDERS = ("wo" + "rk", "ro" + "ot", "ho" + "me")
_LEFT_OVER = {
    "a path of one machine": re.compile(rf"(?<![\w.$}}/-])/(?:{'|'.join(MACHINE_FOLDERS)})/"),
    "a note to do something later": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
}


def left_over_problems(path: str, text: str) -> list[str]:
    """Text files name no path of the machine that they were written on and put nothing off."""
    return [
        f"{path}:{number} holds {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in _LEFT_OVER.items()
        if pattern.search(line)
    ]


def all_problems(sources: Iterable[Source], rule: Callable[[Source], list[str]]) -> list[str]:
    """What one rule says about all files."""
    return [problem for source in sources for problem in rule(source)]
