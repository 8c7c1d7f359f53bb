"""Gather text that every machine has: the Python standard library's sources and the prose of its help topics.

    python examples/quickstart/gather_text.py CORPUS.jsonl

One document a line, `{"text": ...}`, in an order that depends on nothing but the names.
"""

import hashlib
import importlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Not prose and not programs: test suites, packages installed by others, generated tables of characters.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}


def source_files(library: Path) -> Iterator[Path]:
    """The library's Python files, without those of `_LEFT_OUT` and without the help topics, which come as prose."""
    for path in library.rglob("*.py"):
        inside = path.relative_to(library)
        if not _LEFT_OUT & set(inside.parts) and inside.parts[0] != "pydoc_data":
            yield path


def documents() -> Iterator[tuple[str, str]]:
    """(name, text) of every source file that is UTF-8 and of every help topic."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in source_files(library):
        try:
            yield str(path.relative_to(library)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    yield from topics.items()


def shuffled(found: Iterator[tuple[str, str]]) -> list[str]:
    """The texts, mixed by a hash of their names, so that any share of them has both prose and programs."""
    ordered = sorted(found, key=lambda item: hashlib.sha256(item[0].encode()).digest())
    return [text for _, text in ordered if text.strip()]


def main(argv: list[str]) -> int:
    """Write the corpus to the file named in `argv` and say how much it is."""
    if len(argv) != 1:
        print("usage: gather_text.py CORPUS.jsonl", file=sys.stderr)
        return 2
    texts = shuffled(documents())
    Path(argv[0]).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    print(f"{len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} million characters")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
