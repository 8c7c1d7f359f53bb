"""Make the sample indices of a run beforehand, without GPUs: the flags of the run, and --world-size.

    python tools/build_index.py --world-size 512 --data-path corpus_text_document ... (all flags of pretrain_gpt.py)
    python tools/build_index.py --bert --world-size 512 --data-path corpus_text_sentence ... (those of pretrain_bert.py)

The run then finds them in the same folder (`--data-cache-path`). What is there already is read to the last byte and
made anew where it is damaged.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from megatron.base.complaints import ConfigError
from megatron.data import build_bert_datasets, build_gpt_datasets
from megatron.tokenizer import build_tokenizer
from megatron.training.arguments import Parser, parse_composed
from megatron.training.bert import BertRunConfig, vocabulary_ids
from megatron.training.config import RunConfig
from megatron.training.failure import user_errors
from megatron.training.run import Datasets, sample_counts
from megatron.training.setup import world_size


def own_flags() -> Parser:
    """The flags of this tool beside those of the run."""
    parser = Parser(add_help=False, usage=argparse.SUPPRESS)
    group = parser.add_argument_group("Of this tool, beside the flags of the run, which follow")
    group.add_argument("--world-size", type=int, default=world_size(), help="ranks of the run to come")
    group.add_argument("--bert", action="store_true", help="the run is one of pretrain_bert.py, not of pretrain_gpt.py")
    return parser


def split_arguments(argv: Sequence[str]) -> tuple[int, bool, list[str]]:
    """The number of ranks of the run to come, whether it trains a BERT, and the flags that are the run's own."""
    known, words = own_flags().parse_known_args(argv)
    if known.world_size < 1:
        raise ConfigError([f"--world-size {known.world_size}: it must be at least 1"])
    if {"-h", "--help"} & set(words):
        print(own_flags().format_help())
    return known.world_size, known.bert, words


def gpt_datasets(config: RunConfig, ranks: int) -> Datasets:
    """Those of a run of pretrain_gpt.py. No index depends on which token ends a document, so none is needed."""
    return build_gpt_datasets(
        dataclasses.replace(config.data, eod_mask_loss=False),
        num_samples=sample_counts(config, ranks),
        seed=config.training.seed,
        eod_id=None,
        verify=True,
    )


def bert_datasets(config: BertRunConfig, ranks: int) -> Datasets:
    """Those of a run of pretrain_bert.py."""
    return build_bert_datasets(
        config.data,
        config.bert,
        num_samples=sample_counts(config, ranks),
        seed=config.training.seed,
        ids=vocabulary_ids(build_tokenizer(config.tokenizer)),
        verify=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Build the indices and tell what they are; the user's mistakes end it with exit code 2 and a sentence for each."""
    with user_errors():
        ranks, bert, words = split_arguments(sys.argv[1:] if argv is None else argv)
        given: dict[str, Any] = {"world_size": ranks, "prog": "build_index.py", "check_inputs": False}
        began = time.perf_counter()
        if bert:
            datasets = bert_datasets(parse_composed(BertRunConfig, words, **given), ranks)
        else:
            datasets = gpt_datasets(parse_composed(RunConfig, words, **given), ranks)
        for line in (line for dataset in datasets for line in getattr(dataset, "report", list)()):
            print(line)
        print(f"ready after {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
