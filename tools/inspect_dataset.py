"""What is in a token set: `python tools/inspect_dataset.py --data-path PREFIX [--documents 3] [--samples 2] ...`.

Prints counts, a histogram of lengths, the first documents, and samples as a run of seed `--seed` sees them; as text
where a tokenizer is given, else as ids.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence

import numpy as np

from megatron.base.compose import ComposedConfig
from megatron.base.config import Config, choice_problems, flag, flag_name, minimum_problems, range_problems
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed import IndexedDataset
from megatron.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from megatron.tokenizer.config import NEEDED
from megatron.training.arguments import parse_composed
from megatron.training.failure import print_problems

_SHOWN_TOKENS = 200
_BAR = 40  # characters of the longest bar


@dataclasses.dataclass(frozen=True)
class InspectConfig(Config):
    """What is shown."""

    data_path: str = flag(dataclasses.MISSING, "name of the token set, without extension")
    documents: int = flag(0, "documents to show, from --first-document on")
    first_document: int = flag(0, "number of the first document that is shown")
    samples: int = flag(0, "samples to show, in the order of one epoch")
    seq_length: int = flag(1024, "tokens of a sample")
    seed: int = flag(1234, "seed of the order of samples")

    def problems(self) -> list[str]:
        found = choice_problems(self) + minimum_problems(self, 0, "documents", "first_document", "samples")
        found += range_problems(self, 0, 2**32, "seed")  # what NumPy's generator takes
        return found + minimum_problems(self, 1, "seq_length")


@dataclasses.dataclass(frozen=True)
class ShownTokenizerConfig(TokenizerConfig):
    """The tokenizer that made the set, or none."""

    tokenizer_type: str = flag("none", "how ids become text; none shows ids", choices=("none", *NEEDED))

    def problems(self) -> list[str]:
        files = [n for n in ("vocab_file", "merge_file", "tokenizer_model") if getattr(self, n) is not None]
        if self.tokenizer_type == "none" and files:
            return [f"{flag_name(files[0])} {getattr(self, files[0])}: give --tokenizer-type as well"]
        return super().problems()

    def input_problems(self) -> list[str]:
        return [] if self.tokenizer_type == "none" else super().input_problems()


@dataclasses.dataclass(frozen=True)
class InspectRun(ComposedConfig):
    """Show what is in a token set."""

    shown: InspectConfig
    tokenizer: ShownTokenizerConfig


def counts(dataset: IndexedDataset) -> list[str]:
    """How much of what there is."""
    sizes = dataset.sizes
    lines = [
        f"{dataset.prefix}: {len(dataset.document_indices) - 1:,} documents, {len(sizes):,} sequences, "
        f"{int(sizes.sum(dtype=np.int64)):,} tokens of {dataset.dtype.name}"
    ]
    if dataset.dtype.kind != "f":
        lines.append(f"largest id {dataset.max_token_id()}")
    if len(sizes):
        middle = np.percentile(sizes, [50, 90, 99]).astype(int)
        lines.append(
            f"tokens of a sequence: {sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}, median {middle[0]}, "
            f"90 % have at most {middle[1]}, 99 % at most {middle[2]}; {int((sizes == 0).sum()):,} are empty"
        )
    return lines


def histogram(sizes: np.ndarray) -> list[str]:
    """A line for each doubling of the length, with a bar as long as its share: 0, 1, 2-3, 4-7, ..."""
    classes = np.bincount(np.frexp(sizes.astype(np.float64))[1]) if len(sizes) else np.zeros(0, np.int64)
    lines = []
    for power, count in enumerate(classes):
        low, high = (1 << power) >> 1, max((1 << power) - 1, 0)
        label = f"{low}" if low >= high else f"{low}-{high}"
        lines.append(f"{label:>15} {count:>12,} {'#' * round(_BAR * count / classes.max())}".rstrip())
    return lines


def shown(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """The first tokens as text, or as ids where there is no tokenizer."""
    few = ids[:_SHOWN_TOKENS].tolist()
    text = " ".join(map(str, few)) if tokenizer is None else repr(tokenizer.detokenize(few))
    return text + (f" ... ({len(ids):,} tokens)" if len(ids) > len(few) else "")


def documents(dataset: IndexedDataset, first: int, number: int, tokenizer: Tokenizer | None) -> list[str]:
    """A line for each document and, where it has several sequences, for each of those."""
    total = len(dataset.document_indices) - 1
    if number and first >= total:
        raise ValueError(f"--first-document {first}: there are {total} documents, counted from 0")
    lines = []
    for i in range(first, min(first + number, total)):
        begin, end = dataset.document_indices[i : i + 2].tolist()
        sequences = [shown(dataset.get(j), tokenizer) for j in range(begin, end)]
        if len(sequences) == 1:
            lines.append(f"document {i}: {sequences[0]}")
        else:
            lines += [f"document {i}: {len(sequences)} sequences", *(f"  {text}" for text in sequences)]
    return lines


def samples(dataset: IndexedDataset, config: InspectConfig, tokenizer: Tokenizer | None) -> list[str]:
    """A line for each of the first samples of an epoch over all documents."""
    if not config.samples:
        return []
    gpt = GPTDataset(dataset, np.arange(len(dataset)), None, config.seq_length, config.seed)
    return [f"sample {i}: {shown(gpt[i]['tokens'], tokenizer)}" for i in range(min(config.samples, len(gpt)))]


def inspect(run: InspectRun) -> list[str]:
    """All lines."""
    config = run.shown
    tokenizer = None if run.tokenizer.tokenizer_type == "none" else build_tokenizer(run.tokenizer)
    dataset = IndexedDataset(config.data_path)
    lines = [*counts(dataset), *histogram(dataset.sizes)]
    lines += documents(dataset, config.first_document, config.documents, tokenizer)
    return lines + samples(dataset, config, tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for the user's mistakes."""
    try:
        run = parse_composed(InspectRun, argv, world_size=1, prog="inspect_dataset.py")
        for line in inspect(run):
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the exit
    except (ValueError, OSError) as error:
        print_problems(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
