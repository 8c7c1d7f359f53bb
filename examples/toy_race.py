"""A few questions in RACE's layout, made of a text: `python examples/toy_race.py TEXT FOLDER`.

An article is a paragraph, and the right option is a word of it, the others being words of other paragraphs. They are
for toy runs, and there is nothing to learn from so few.
"""

import json
import random
import re
import sys
from pathlib import Path

_QUESTIONS = 2  # of an article
_OPTIONS = 4


def paragraphs(text: str) -> list[list[str]]:
    """The words of every paragraph that has enough different ones."""
    words = [re.findall(r"[a-z]{4,}", paragraph.lower()) for paragraph in re.split(r"\n\s*\n", text)]
    return [found for found in words if len(set(found)) > 3 * _OPTIONS]


def article(words: list[str], others: list[str], chance: random.Random) -> dict[str, object]:
    """One file of RACE."""
    outside = sorted(set(others) - set(words))
    answers = [chance.randrange(_OPTIONS) for _ in range(_QUESTIONS)]
    options = [chance.sample(outside, _OPTIONS) for _ in answers]
    for offered, answer in zip(options, answers, strict=True):
        offered[answer] = chance.choice(words)
    return {
        "article": " ".join(words),
        "questions": ["The text has the word _ ."] * _QUESTIONS,
        "options": options,
        "answers": ["ABCD"[answer] for answer in answers],
    }


def main(argv: list[str]) -> int:
    """Write three articles for each part and group below the folder named in `argv`."""
    if len(argv) != 2:
        print("usage: toy_race.py TEXT FOLDER", file=sys.stderr)
        return 2
    chance = random.Random(1)
    found = paragraphs(Path(argv[0]).read_text(encoding="utf-8"))
    for part in ("train", "dev", "test"):
        for group in ("middle", "high"):
            folder = Path(argv[1], part, group)
            folder.mkdir(parents=True)
            for number in range(3):
                words, others = chance.sample(found, 2)
                text = json.dumps(article(words, others, chance))
                (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
