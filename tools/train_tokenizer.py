"""Train a byte-level BPE tokenizer of GPT-2's kind: `python tools/train_tokenizer.py --input FILE --output-dir D ...`.

Writes `D/vocab.json` and `D/merges.txt`; `<|endoftext|>` is the last id.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tqdm import tqdm

from megatron.base.compose import ComposedConfig
from megatron.base.config import Config, flag, minimum_problems
from megatron.base.files import atomic_write
from megatron.data.records import NOT_UTF8, BadRecord, BadRecords, texts_of
from megatron.training.arguments import parse_composed
from megatron.training.failure import print_problems

END_OF_TEXT = "<|endoftext|>"
_SMALLEST = 257  # the 256 bytes and the end of text


@dataclasses.dataclass(frozen=True)
class TrainTokenizerConfig(Config):
    """What is read and written."""

    input: tuple[str, ...] = flag(
        dataclasses.MISSING,
        "files to learn from, in UTF-8: JSONL where the name ends in .jsonl or .json, else plain text",
    )
    output_dir: str = flag(dataclasses.MISSING, "folder in which vocab.json and merges.txt are written")
    json_key: str = flag("text", "key of the JSON objects of JSONL files that holds the text")
    vocab_size: int = flag(4096, "ids of the finished tokenizer, the end of text included")

    def problems(self) -> list[str]:
        absent = [f"--input {path}: there is no such file" for path in self.input if not Path(path).is_file()]
        return absent + minimum_problems(self, _SMALLEST, "vocab_size")


@dataclasses.dataclass(frozen=True)
class TrainTokenizerRun(ComposedConfig):
    """Train a byte-level BPE tokenizer."""

    files: TrainTokenizerConfig


def texts(config: TrainTokenizerConfig, bad: dict[str, BadRecords]) -> Iterator[str]:
    """The texts of all files with a progress bar over their bytes; lines without one are counted in `bad` by file."""
    total = sum(os.path.getsize(path) for path in config.input)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading") as bar:
        for path in config.input:
            bad[path] = BadRecords()
            with open(path, "rb") as stream:
                for number, line in enumerate(stream, start=1):
                    bar.update(len(line))
                    try:
                        yield line_text(line, config.json_key if path.endswith((".jsonl", ".json")) else None)
                    except BadRecord as error:
                        bad[path].add(str(error), number)


def line_text(line: bytes, json_key: str | None) -> str:
    """The text under `json_key` of the JSON object on `line`, the line itself where that is None."""
    if json_key is not None:
        return texts_of(line, [json_key])[0]
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRecord(NOT_UTF8) from None


def train(config: TrainTokenizerConfig, bad: dict[str, BadRecords]) -> tuple[dict[str, int], list[str]]:
    """The vocabulary, and the merges as lines of a merges.txt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - 1,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(config, bad), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    # sorted by id, as the file is read by people too
    vocabulary = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    vocabulary[END_OF_TEXT] = len(vocabulary)
    return vocabulary, [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def write(folder: Path, vocabulary: dict[str, int], merges: list[str]) -> None:
    """`vocab.json` and `merges.txt` in `folder`, each complete or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "vocab.json") as stream:
        json.dump(vocabulary, stream, ensure_ascii=False)
    with atomic_write(folder / "merges.txt") as stream:
        stream.write("\n".join(["#version: 0.2", *merges]) + "\n")


def report(bad: dict[str, BadRecords]) -> list[str]:
    """What was skipped in each file."""
    return [f"{path}: {line.strip()}" for path, records in bad.items() for line in records.report()]


def train_and_write(config: TrainTokenizerConfig) -> None:
    """Do what `config` asks for and say what was done."""
    bad: dict[str, BadRecords] = {}
    vocabulary, merges = train(config, bad)
    if not merges:
        raise ValueError("\n".join([f"--input {' '.join(config.input)}: no text to learn from", *report(bad)]))
    write(Path(config.output_dir), vocabulary, merges)
    few = (
        "" if len(vocabulary) == config.vocab_size else f" (the text gives no more, {config.vocab_size} were asked for)"
    )
    print(f"{config.output_dir}: vocab.json with {len(vocabulary)} ids{few}, merges.txt with {len(merges)} merges")
    for line in report(bad):
        print(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for the user's mistakes."""
    try:
        train_and_write(parse_composed(TrainTokenizerRun, argv, world_size=1, prog="train_tokenizer.py").files)
    except (ValueError, OSError) as error:
        print_problems(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
