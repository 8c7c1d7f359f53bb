"""Text to the token files that a run reads: `python tools/preprocess_data.py --input FILES --output-prefix P ...`.

Reads JSONL, plain text and Parquet, compressed or not. The text under each of `--json-keys` becomes a document of
`P_KEY_document.bin/.idx`; with `--split-sentences` a document of several sequences in `P_KEY_sentence.bin/.idx`.
"""

import contextlib
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Self

from tqdm import tqdm

from megatron.base.compose import ComposedConfig
from megatron.base.config import Config, choice_problems, flag, minimum_problems
from megatron.base.files import folder_problem, new_folder
from megatron.data.corpus import Encoder, WorkerPool, encode_sources, handed_over
from megatron.data.corpus_sets import Output, open_writers, write_encoded, write_partitions
from megatron.data.indexed import IndexedWriter, best_dtype
from megatron.data.inputs import FORMATS, TEXT_DOCUMENTS, cut, find_sources
from megatron.data.records import BadRecords, Source
from megatron.data.sentences import SentenceSplitter
from megatron.tokenizer import TokenizerConfig, build_tokenizer
from megatron.training.arguments import parse_composed
from megatron.training.failure import print_problems


@dataclasses.dataclass(frozen=True)
class PreprocessConfig(Config):
    """What is read and written."""

    input: tuple[str, ...] = flag(
        dataclasses.MISSING,
        "files or quoted globs, in UTF-8: .txt is plain text, .parquet Parquet, else JSONL (an object a line), "
        "all but Parquet also with .gz, .zst, .xz or .bz2 behind it",
    )
    output_prefix: str = flag(dataclasses.MISSING, "start of the output names, to which _KEY_document.bin and .idx add")
    input_format: str = flag("auto", "what the files are, where their names do not tell", choices=FORMATS)
    json_keys: tuple[str, ...] = flag(
        ("text",), "keys of the JSON object, or columns of Parquet, that hold text; each gives its own output"
    )
    text_documents: str = flag(
        "line",
        "what is a document of plain text: a line, what stands between blank lines, or a file",
        choices=TEXT_DOCUMENTS,
    )
    split_sentences: bool = flag(
        False, "cut documents into sentences, a sequence each, into _KEY_sentence.bin and .idx"
    )
    lang: str = flag(
        "en", "language whose rules end a sentence: its ISO 639 code; an unknown one means those of English"
    )
    append_eod: bool = flag(False, "end each document with the tokenizer's end-of-document id")
    workers: int = flag(1, "processes that tokenise")
    partitions: int = flag(
        1,
        "parts of the input, each read, tokenised and written by one process, then put together to the same output",
    )
    on_bad_record: str = flag(
        "skip", "skip bad records and count them by kind, or fail at the first", choices=("skip", "fail")
    )
    log_interval: int = flag(100, "documents between updates of the progress bar")
    dataset_impl: str = flag("mmap", "layout of the output", choices=("mmap",))

    def problems(self) -> list[str]:
        found = choice_problems(self) + minimum_problems(self, 1, "workers", "partitions", "log_interval")
        if len(set(self.json_keys)) < len(self.json_keys):
            found.append(f"--json-keys {' '.join(self.json_keys)}: the same key twice would be the same file twice")
        found += [
            f"--json-keys {key}: a key becomes part of a file's name, which takes no /"
            for key in self.json_keys
            if "/" in key
        ]
        if not re.fullmatch("[a-z]{2,3}", self.lang):
            found.append(f"--lang {self.lang}: expected a code of two or three letters, such as en")
        if why := folder_problem(Path(self.output_prefix).parent):
            found.append(f"--output-prefix {self.output_prefix}: it cannot be written, for {why}")
        return found + find_sources(self.input, self.input_format, self.text_documents, self.json_keys)[1]

    def sources(self) -> list[Source]:
        """The input files."""
        return find_sources(self.input, self.input_format, self.text_documents, self.json_keys)[0]

    def output(self, encoder: Encoder) -> Output:
        """The sets to be written."""
        level = "sentence" if self.split_sentences else "document"
        prefixes = [f"{self.output_prefix}_{key}_{level}" for key in self.json_keys]
        return Output(prefixes, list(self.json_keys), encoder.dtype)


@dataclasses.dataclass(frozen=True)
class PreprocessRun(ComposedConfig):
    """Turn text into token files."""

    files: PreprocessConfig
    tokenizer: TokenizerConfig

    unsupported_flags = frozenset({"keep-newlines"})  # what stands between sentences is in none of them


def make_encoder(run: PreprocessRun) -> Encoder:
    """The encoder that `run` asks for."""
    tokenizer = build_tokenizer(run.tokenizer)
    split = SentenceSplitter(run.files.lang) if run.files.split_sentences else None
    return Encoder(tokenizer, run.files.json_keys, run.files.append_eod, best_dtype(tokenizer.vocab_size), split)


class Progress:
    """A progress bar over the bytes of the input that also tells documents a second."""

    def __init__(self, total: int, log_interval: int) -> None:
        self.bar = tqdm(total=total, unit="B", unit_scale=True, desc="tokenising")
        self.documents = 0
        self._shown = 0
        self._interval = log_interval

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._show_rate()
        self.bar.close()

    def advance(self, documents: int, size: int) -> None:
        """Count documents, and bytes of the input."""
        self.documents += documents
        if self.documents - self._shown >= self._interval:
            self._show_rate()
        self.bar.update(size)

    def _show_rate(self) -> None:
        self._shown = self.documents
        rate = self.documents / max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(f"{rate:,.0f} documents/s", refresh=False)


def write_all(run: PreprocessRun, encoder: Encoder, sources: list[Source], bad: BadRecords) -> list[IndexedWriter]:
    """Write all sets and count bad records; the files appear when all is written."""
    config, output = run.files, run.files.output(encoder)
    with contextlib.ExitStack() as stack:
        writers = stack.enter_context(open_writers(output))
        total = sum(os.path.getsize(source.path) for source in sources)
        progress = stack.enter_context(Progress(total, config.log_interval))
        if config.partitions > 1:
            pool = WorkerPool(handed_over(encoder), config.workers)
            write_partitions(writers, output, cut(sources, config.partitions), pool, bad, progress.advance)
        else:
            make = (lambda: encoder) if config.workers == 1 else handed_over(encoder)
            parts = encode_sources(sources, config.json_keys, make, config.workers)
            write_encoded(writers, stack.enter_context(contextlib.closing(parts)), bad, progress.advance)
        if progress.documents == 0:
            names = " ".join(config.input)
            raise ValueError("\n".join([f"--input {names}: there is no usable document", *bad.report()]))
    return writers


def preprocess(run: PreprocessRun) -> None:
    """Do what `run` asks for and say what was done."""
    encoder = make_encoder(run)  # complains here, not in a worker
    bad = BadRecords(fail=run.files.on_bad_record == "fail")
    with new_folder(Path(run.files.output_prefix).parent):
        writers = write_all(run, encoder, run.files.sources(), bad)
    for writer in writers:
        sentences = f" in {writer.sequences:,} sentences" if run.files.split_sentences else ""
        print(
            f"{writer.prefix}.bin: {writer.documents:,} documents{sentences}, {writer.tokens:,} tokens of "
            f"{encoder.dtype.name}"
        )
    for line in bad.report():
        print(line)


class Terminated(KeyboardInterrupt):
    """The process was asked to end, by SIGTERM."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM raise `Terminated` in the block, so that what is half written is taken away."""

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the clean-up is not interrupted
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for the user's mistakes, 1 where a worker died, 130 and 143 when interrupted."""
    try:
        with terminable():
            preprocess(parse_composed(PreprocessRun, argv, world_size=1, prog="preprocess_data.py"))
    except (ValueError, OSError) as error:
        print_problems(error)
        return 2
    except BrokenExecutor:
        print("error: a worker process died, for want of memory perhaps; nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
