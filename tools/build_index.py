"""Make the sample indices of a run beforehand, without GPUs: the flags of pretrain_gpt.py, and --world-size.

    python tools/build_index.py --world-size 512 --data-path corpus_text_document ... (all flags of the run)

The run then finds them in the same folder (`--data-cache-path`). What is there already is read to the last byte and
made anew where it is damaged.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence

from megatron.data import build_gpt_datasets
from megatron.training.arguments import Parser, parse_composed
from megatron.training.config import RunConfig
from megatron.training.failure import user_errors
from megatron.training.run import sample_counts
from megatron.training.setup import world_size


def split_arguments(argv: Sequence[str]) -> tuple[int, list[str]]:
    """The number of ranks of the run to come, and the flags that are the run's own."""
    parser = Parser(add_help=False)
    parser.add_argument("--world-size", type=int, default=world_size())
    known, words = parser.parse_known_args(argv)
    return known.world_size, words


def main(argv: Sequence[str] | None = None) -> None:
    """Build the indices and tell what they are; the user's mistakes end it with exit code 2 and a sentence for each."""
    with user_errors():
        ranks, words = split_arguments(sys.argv[1:] if argv is None else argv)
        config = parse_composed(RunConfig, words, world_size=ranks, prog="build_index.py", check_inputs=False)
        began = time.perf_counter()
        # No index depends on which token ends a document, so none is needed here.
        datasets = build_gpt_datasets(
            dataclasses.replace(config.data, eod_mask_loss=False),
            num_samples=sample_counts(config, ranks),
            seed=config.training.seed,
            eod_id=None,
            builds_indices=True,
            verify=True,
        )
        for line in (line for dataset in datasets if dataset is not None for line in dataset.report()):
            print(line)
        print(f"ready after {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
