"""A run in which rank 1 fails in its third forward pass; started by test_failures: MODE, then flags of pretrain_gpt."""

import functools
import os
import signal
import sys

import pretrain_gpt
from megatron.tokenizer import build_tokenizer
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.failure import user_errors
from megatron.training.loop import pretrain


def main(mode: str, words: list[str]) -> None:
    """`raise` raises an exception, `kill` ends the process without a word."""
    calls = 0

    def forward_step(model, batch):
        nonlocal calls
        calls += 1
        if calls == 3 and os.environ["RANK"] == "1":
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the third batch is cursed")
        return pretrain_gpt.forward_step(model, batch)

    config = parse_composed(RunConfig, words)
    tokenizer = build_tokenizer(config.tokenizer)
    pretrain(
        config,
        model_provider=functools.partial(pretrain_gpt.provide_model, config, tokenizer.vocab_size),
        dataset_provider=functools.partial(pretrain_gpt.provide_datasets, config, tokenizer),
        forward_step=forward_step,
        vocab_size=tokenizer.vocab_size,
    )


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1], sys.argv[2:])
