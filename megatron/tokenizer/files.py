"""Reads the files of tokenizers; ValueError, naming flag and file, for those that are missing or not understood."""

import json
from pathlib import Path

from tokenizers import pre_tokenizers

from megatron.tokenizer.special import NAMES


def read_bytes(flag: str, path: str) -> bytes:
    """What is in the file that `flag` names."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from None


def read_text(flag: str, path: str) -> str:
    """The text of the file that `flag` names, which must be UTF-8; its line ends are left as they are."""
    try:
        return read_bytes(flag, path).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} is not a text file in UTF-8") from None


def read_bpe_vocabulary(path: str) -> dict[str, int]:
    """The dict of a vocab.json, whose ids are distinct and which has all 256 one-byte tokens."""
    text = read_text("--vocab-file", path)
    try:
        vocabulary = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--vocab-file {path} is not JSON: {error}") from None
    # bool is an int to Python, not to a vocabulary
    if not isinstance(vocabulary, dict) or any(type(i) is not int or not 0 <= i < 2**31 for i in vocabulary.values()):
        raise ValueError(f"--vocab-file {path}: expected a JSON object from token to id")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ValueError(f"--vocab-file {path}: several tokens have the same id")
    missing = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter not in vocabulary]
    if missing:
        # without them the library would drop bytes of the text in silence
        raise ValueError(
            f"--vocab-file {path}: {len(missing)} of the 256 one-byte tokens are missing; where no text is tokenized, "
            f"--tokenizer-type NullTokenizer with --vocab-size {1 + max(vocabulary.values(), default=-1)} needs no file"
        )
    return vocabulary


def read_merges(path: str) -> list[tuple[str, str]]:
    """The pairs of a merges.txt; a first line that starts with `#version` is skipped."""
    pairs = []
    for number, line in enumerate(read_text("--merge-file", path).split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        words = line.rstrip("\r").split(" ")
        if len(words) != 2:
            raise ValueError(f"--merge-file {path}, line {number}: expected two tokens with a blank between them")
        pairs.append((words[0], words[1]))
    return pairs


def read_word_pieces(path: str) -> dict[str, int]:
    """The tokens of a vocab.txt, one a line; the first has id 0. It has an unknown word, and no token twice."""
    # only "\n" ends a line: a vocabulary may hold U+2028 and the like as tokens
    lines = [line.rstrip("\r") for line in read_text("--vocab-file", path).split("\n")]
    if lines[-1] == "":
        lines.pop()
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(lines):
        if token in vocabulary:
            first = vocabulary[token] + 1
            raise ValueError(f"--vocab-file {path}, line {i + 1}: the token {token!r} stands in line {first} already")
        vocabulary[token] = i
    if NAMES["unk"][0] not in vocabulary:
        raise ValueError(f"--vocab-file {path}: no line is {NAMES['unk'][0]}, the token for unknown words")
    return vocabulary
