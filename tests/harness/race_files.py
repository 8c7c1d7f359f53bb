"""Folders in RACE's layout, files in GLUE's and a vocabulary for them, for tests of fine-tuning."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WORDS = tuple(f"w{i}" for i in range(40))
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "is", "the", "answer", "?", *WORDS)


def write_vocabulary(folder: Path) -> Path:
    """A vocab.txt of whole words."""
    path = folder / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return path


def article(chance: random.Random, questions: int = 2, words: int = 6) -> dict[str, Any]:
    """An object of RACE whose right option is a word of the article, the others being none."""
    inside = chance.sample(WORDS, words)
    outside = [word for word in WORDS if word not in inside]
    record: dict[str, Any] = {"answers": [], "options": [], "questions": [], "article": " ".join(inside)}
    for _ in range(questions):
        answer = chance.randrange(4)
        options = chance.sample(outside, 4)
        options[answer] = chance.choice(inside)
        record["answers"].append("ABCD"[answer])
        record["options"].append(options)
        record["questions"].append(chance.choice(["the answer is _ ?", "the answer is"]))
    return record


def write_race(folder: Path, articles: dict[str, int], *, seed: int = 0, questions: int = 2) -> Path:
    """So many articles of each group (`middle`, `high`) below `folder`."""
    chance = random.Random(seed)
    for group, number in articles.items():
        (folder / group).mkdir(parents=True)
        for i in range(number):
            text = json.dumps(article(chance, questions))
            (folder / group / f"{i}.txt").write_text(text, encoding="utf-8")
    return folder


def write_tsv(path: Path, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Path:
    """A tab-separated file with a line of names."""
    path.write_text("".join("\t".join(row) + "\n" for row in [names, *rows]), encoding="utf-8")
    return path
