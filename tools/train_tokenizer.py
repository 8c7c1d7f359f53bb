"""Train a byte-level BPE tokenizer of GPT-2's kind: `python tools/train_tokenizer.py --input FILE --output-dir D ...`.

Writes `D/vocab.json` and `D/merges.txt`; `<|endoftext|>` is the last id.
"""

import dataclasses
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tqdm import tqdm

from megatron.base.compose import ComposedConfig
from megatron.base.config import Config, flag, minimum_problems
from megatron.base.files import atomic_write, folder_problem, new_folder
from megatron.data.corpus import read_all
from megatron.data.inputs import find_sources
from megatron.data.records import BadRecords, Source, documents_of
from megatron.training.arguments import parse_composed
from megatron.training.failure import exit_code

END_OF_TEXT = "<|endoftext|>"
_SMALLEST = 257  # the 256 bytes and the end of text
_LARGEST = 10_000_000  # the trainer takes memory for all ids at its start
_LONGEST = 1_000  # characters: the trainer's time grows with the square of a word's length
# Every word of the tokenizer lies in one of these runs, but for a blank in front of it.
_TOO_LONG = re.compile(rf"(?<!\S)\S{{{_LONGEST + 1},}}|(?<!\s)\s{{{_LONGEST + 1},}}")


@dataclasses.dataclass(frozen=True)
class TrainTokenizerConfig(Config):
    """What is read and written."""

    input: tuple[str, ...] = flag(
        dataclasses.MISSING,
        "files or quoted globs to learn from, in UTF-8: .txt is plain text, .parquet Parquet, any other name JSONL, "
        "all but Parquet also with .gz, .zst, .xz or .bz2 behind it; what goes on without a blank, or in blanks, for "
        f"more than {_LONGEST} characters is cut",
    )
    output_dir: str = flag(dataclasses.MISSING, "folder in which vocab.json and merges.txt are written")
    json_key: str = flag("text", "key of the JSON object, or column of Parquet, that holds the text")
    vocab_size: int = flag(4096, "ids of the finished tokenizer, the end of text included")

    def problems(self) -> list[str]:
        absent = find_sources(self.input, "auto", "line", [self.json_key])[1]
        if self.vocab_size > _LARGEST:
            absent.append(f"--vocab-size {self.vocab_size}: it must be at most {_LARGEST}")
        if why := folder_problem(self.output_dir):
            absent.append(f"--output-dir {self.output_dir}: it cannot be written, for {why}")
        return absent + minimum_problems(self, _SMALLEST, "vocab_size")

    def sources(self) -> list[Source]:
        """The input files."""
        return find_sources(self.input, "auto", "line", [self.json_key])[0]


@dataclasses.dataclass(frozen=True)
class TrainTokenizerRun(ComposedConfig):
    """Train a byte-level BPE tokenizer."""

    files: TrainTokenizerConfig


@dataclasses.dataclass
class Read:
    """What is told of the text: bad records, and words that were cut."""

    bad: BadRecords = dataclasses.field(default_factory=BadRecords)
    cut_words: int = 0

    def report(self) -> list[str]:
        """A sentence for each thing that was left out or changed."""
        words = f"cut {self.cut_words} words of more than {_LONGEST} characters"
        return ([words] if self.cut_words else []) + self.bad.report()


def with_words_cut(text: str, read: Read) -> Iterator[str]:
    """`text` in parts without a word longer than the trainer is given."""
    start = 0
    for found in _TOO_LONG.finditer(text) if _may_hold_too_long(text) else ():
        read.cut_words += 1
        for cut in range(found.start() + _LONGEST, found.end(), _LONGEST):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _may_hold_too_long(text: str) -> bool:
    """Whether looking closely, which takes time, is needed: a run that is too long fills one of these blocks."""
    block = _LONGEST // 2
    return any(len(text[k : k + block].split(None, 1)) < 2 for k in range(0, len(text) - block + 1, block))


def texts(config: TrainTokenizerConfig, read: Read) -> Iterator[str]:
    """The texts of all files with a progress bar over their bytes; records without one are counted in `read`."""
    sources = config.sources()
    total = sum(os.path.getsize(source.path) for source in sources)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading") as bar:
        for chunk in read_all(sources, [config.json_key]):
            documents = documents_of(chunk, [config.json_key])
            for text in itertools.chain.from_iterable(documents.texts):
                yield from with_words_cut(text, read)
            for kind, number in documents.bad:
                read.bad.add(kind, chunk.source, number)
            bar.update(chunk.bytes)


def train(config: TrainTokenizerConfig, read: Read) -> tuple[dict[str, int], list[str]]:
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
    tokenizer.train_from_iterator(texts(config, read), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    # sorted by id, as the file is read by people too
    vocabulary = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    vocabulary[END_OF_TEXT] = len(vocabulary)
    return vocabulary, [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def write(folder: Path, vocabulary: dict[str, int], merges: list[str]) -> None:
    """`vocab.json` and `merges.txt` in `folder`, both or, where one cannot be written, none."""
    with (
        new_folder(folder),
        atomic_write(folder / "vocab.json") as first,
        atomic_write(folder / "merges.txt") as second,
    ):
        json.dump(vocabulary, first, ensure_ascii=False)
        second.write("\n".join(["#version: 0.2", *merges]) + "\n")


def train_and_write(config: TrainTokenizerConfig) -> None:
    """Do what `config` asks for and say what was done."""
    read = Read()
    vocabulary, merges = train(config, read)
    if not merges:
        raise ValueError("\n".join([f"--input {' '.join(config.input)}: no text to learn from", *read.report()]))
    write(Path(config.output_dir), vocabulary, merges)
    few = (
        "" if len(vocabulary) == config.vocab_size else f" (the text gives no more, {config.vocab_size} were asked for)"
    )
    print(f"{config.output_dir}: vocab.json with {len(vocabulary)} ids{few}, merges.txt with {len(merges)} merges")
    for line in read.report():
        print(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for the user's mistakes."""
    return exit_code(
        lambda: train_and_write(parse_composed(TrainTokenizerRun, argv, world_size=1, prog="train_tokenizer.py").files)
    )


if __name__ == "__main__":
    sys.exit(main())
