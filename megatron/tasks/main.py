"""Fine-tune a BERT: `torchrun --nproc-per-node N -m megatron.tasks.main --task RACE|MNLI|QQP FLAGS`; see --help."""

import sys
from collections.abc import Sequence

from megatron.tasks.config import FinetuneConfig
from megatron.tasks.finetune import finetune
from megatron.training.arguments import parse_composed
from megatron.training.failure import user_errors


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags and fine-tune; the user's mistakes end it with exit code 2 and a sentence for each."""
    with user_errors():
        finetune(parse_composed(FinetuneConfig, argv, prog="megatron.tasks.main"))


if __name__ == "__main__":
    main(sys.argv[1:])
