"""A small vocabulary for BERT from text: `python examples/vocabulary.py TEXT VOCAB.txt --size N`.

The special tokens, every frequent character by itself and inside a word, and the most frequent lower-case words, so
that rare words are spelt; with --no-spelling they are unknown. It is for examples that train on little text; a real run
has the 30,522 entries of the published BERT.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import normalizers, pre_tokenizers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_RAREST = 20  # a character that is rarer becomes [UNK]


def words_of(text: str) -> Iterator[str]:
    """The words and signs that `--tokenizer-type BertWordPieceLowerCase` sees in `text`."""
    cut = pre_tokenizers.BertPreTokenizer()
    normalizer = normalizers.BertNormalizer(lowercase=True)
    for line in text.splitlines():
        yield from (word for word, _ in cut.pre_tokenize_str(normalizer.normalize_str(line)))


def letters_of(words: Counter[str]) -> list[str]:
    """The characters that are in many words."""
    characters: Counter[str] = Counter()
    for word, count in words.items():
        characters.update(dict.fromkeys(word, count))
    return sorted(letter for letter, count in characters.items() if count >= _RAREST)


def vocabulary(text: str, size: int, *, spelling: bool = True) -> list[str]:
    """At most `size` entries; of equally frequent ones the first in the alphabet."""
    words = Counter(words_of(text))
    letters = letters_of(words) if spelling else []
    frequent = sorted(words.keys() - set(letters), key=lambda word: (-words[word], word))
    return [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *frequent][:size]


def read_text(path: Path) -> str:
    """The text of a plain file, or all texts of a JSONL file."""
    text = path.read_text(encoding="utf-8")
    return "\n".join(json.loads(line)["text"] for line in text.splitlines()) if path.suffix == ".jsonl" else text


def main(argv: Sequence[str] | None = None) -> int:
    """Write the vocabulary of the file named in `argv`."""
    parser = argparse.ArgumentParser(description="Write a small vocabulary for BERT.")
    parser.add_argument("text", type=Path, help="plain text, or JSONL with a field text")
    parser.add_argument("vocabulary", type=Path, help="file to write, one entry a line")
    parser.add_argument("--size", type=int, default=2048, help="most entries")
    parser.add_argument("--no-spelling", action="store_true", help="no entries for the characters of rare words")
    asked = parser.parse_args(argv)
    entries = vocabulary(read_text(asked.text), asked.size, spelling=not asked.no_spelling)
    asked.vocabulary.write_text("\n".join(entries) + "\n", encoding="utf-8")
    print(f"{asked.vocabulary}: {len(entries)} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
