"""JSONL text to the token files that a run reads: `python tools/preprocess_data.py --input FILE --output-prefix P ...`.

Each line is a JSON object; the text under each of `--json-keys` becomes a document of `P_KEY_document.bin/.idx`.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Self

import numpy as np
from tqdm import tqdm

from megatron.base.compose import ComposedConfig
from megatron.base.config import Config, choice_problems, flag, minimum_problems
from megatron.data.corpus import Encoded, Encoder, encode_file
from megatron.data.indexed import IndexedWriter, best_dtype
from megatron.data.records import BadRecords
from megatron.tokenizer import TokenizerConfig, build_tokenizer
from megatron.training.arguments import parse_composed
from megatron.training.failure import print_problems


@dataclasses.dataclass(frozen=True)
class PreprocessConfig(Config):
    """What is read and written."""

    input: str = flag(dataclasses.MISSING, "JSONL file: one JSON object a line, in UTF-8")
    output_prefix: str = flag(dataclasses.MISSING, "start of the output names, to which _KEY_document.bin and .idx add")
    json_keys: tuple[str, ...] = flag(("text",), "keys of the JSON object that hold text; each gives its own output")
    append_eod: bool = flag(False, "end each document with the tokenizer's end-of-document id")
    workers: int = flag(1, "processes that tokenise")
    log_interval: int = flag(100, "documents between updates of the progress bar")
    dataset_impl: str = flag("mmap", "layout of the output", choices=("mmap",))

    def problems(self) -> list[str]:
        found = choice_problems(self) + minimum_problems(self, 1, "workers", "log_interval")
        if not Path(self.input).is_file():
            found.append(f"--input {self.input}: there is no such file")
        if len(set(self.json_keys)) < len(self.json_keys):
            found.append(f"--json-keys {' '.join(self.json_keys)}: the same key twice would be the same file twice")
        return found


@dataclasses.dataclass(frozen=True)
class PreprocessRun(ComposedConfig):
    """Turn JSONL text into token files."""

    files: PreprocessConfig
    tokenizer: TokenizerConfig


def make_encoder(run: PreprocessRun) -> Encoder:
    """The encoder that `run` asks for; also called in each worker process."""
    tokenizer = build_tokenizer(run.tokenizer)
    return Encoder(tokenizer, run.files.json_keys, run.files.append_eod, best_dtype(tokenizer.vocab_size))


def output_prefix(config: PreprocessConfig, key: str) -> str:
    """The name, without extension, of the token files of `key`."""
    return f"{config.output_prefix}_{key}_document"


class Progress:
    """A progress bar over the bytes of the input that also tells documents a second."""

    def __init__(self, path: str, log_interval: int) -> None:
        self.bar = tqdm(total=os.path.getsize(path), unit="B", unit_scale=True, desc="tokenising")
        self.documents = 0
        self._shown = 0
        self._interval = log_interval

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._show_rate()
        self.bar.close()

    def advance(self, part: Encoded) -> None:
        """Count the documents and bytes of `part`."""
        self.documents += part.documents
        if self.documents - self._shown >= self._interval:
            self._show_rate()
        self.bar.update(part.bytes)

    def _show_rate(self) -> None:
        self._shown = self.documents
        rate = self.documents / max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(f"{rate:,.0f} documents/s", refresh=False)


def write_all(
    config: PreprocessConfig, dtype: np.dtype, parts: Iterable[Encoded], bad: BadRecords
) -> list[IndexedWriter]:
    """Write what `parts` hold, a set for each key, and count bad lines; the files appear when all is written."""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(output_prefix(config, key), dtype)) for key in config.json_keys]
        progress = stack.enter_context(Progress(config.input, config.log_interval))
        for part in parts:
            for writer, tokens, sizes in zip(writers, part.tokens, part.sizes, strict=True):
                writer.add_documents(tokens, sizes)
            for kind, line in part.bad:
                bad.add(kind, line)
            progress.advance(part)
        if progress.documents == 0:
            raise ValueError("\n".join([f"--input {config.input}: it holds no usable document", *bad.report()]))
    return writers


def preprocess(run: PreprocessRun) -> None:
    """Do what `run` asks for and say what was done."""
    dtype = make_encoder(run).dtype  # complains here, not in a worker
    Path(run.files.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    bad = BadRecords()
    with contextlib.closing(
        encode_file(run.files.input, functools.partial(make_encoder, run), run.files.workers)
    ) as parts:
        writers = write_all(run.files, dtype, parts, bad)
    for writer in writers:
        print(f"{writer.prefix}.bin: {writer.documents:,} documents, {writer.tokens:,} tokens of {dtype.name}")
    for line in bad.report():
        print(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for the user's mistakes, 1 where a worker process died, 130 when interrupted."""
    try:
        preprocess(parse_composed(PreprocessRun, argv, world_size=1, prog="preprocess_data.py"))
    except (ValueError, OSError) as error:
        print_problems(error)
        return 2
    except BrokenExecutor:
        print("error: a worker process died, for want of memory perhaps; nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
