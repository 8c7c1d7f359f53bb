"""Pretrain a GPT: `torchrun --nproc-per-node N pretrain_gpt.py FLAGS` (or plain `python` for one rank); see --help.

This file says what a GPT run is made of: its model, its data and its loss. To train something of your own, write a file
like this one around `megatron.training.loop.pretrain`.
"""

import functools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron import mpu
from megatron.data import build_gpt_datasets
from megatron.model import Chunk, GPTModel, build_gpt
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.failure import TRAINING_LOST, mistakes, user_errors
from megatron.training.flops import flops_per_sample
from megatron.training.launcher import local_rank
from megatron.training.loop import pretrain
from megatron.training.observers import Observer
from megatron.training.pipeline import Batch
from megatron.training.run import Datasets, SampleCounts
from megatron.training.state import Trainee


def provide_model(config: RunConfig, vocab_size: int, dtype: torch.dtype, device: torch.device) -> GPTModel:
    """This rank's part of the model, its weights drawn from the seed alike for every layout."""
    return build_gpt(
        config.model,
        vocab_size,
        config.training.seed,
        dtype=dtype,
        device=device,
        sequence_parallel=config.distributed.sequence_parallel,
        recompute=config.recompute,
        stages=config.stages_of(mpu.get_pipeline_model_parallel_rank(), config.model.vocabulary_rows(vocab_size)),
    )


def provide_datasets(config: RunConfig, tokenizer: Tokenizer, counts: SampleCounts) -> Datasets:
    """Training, validation and test sets for the samples that the run will ask; one rank of a node makes indices."""
    return build_gpt_datasets(
        config.data,
        num_samples=counts,
        seed=config.training.seed,
        eod_id=tokenizer.eod if config.data.needs_end_of_document else None,
        builds_indices=local_rank() == 0,
    )


def forward_step(stage: Chunk, batch: Batch) -> tuple[Tensor, Tensor] | Tensor:
    """Sum of the losses of a micro-batch's counted tokens, and their number; hidden states before the last stage."""
    output = stage(
        batch["tokens"],
        batch.get("position_ids"),
        batch["labels"],
        document_lengths=batch.get("document_lengths"),
        hidden=batch.get("hidden"),
    )  # losses [b, s], or hidden states [s, b, h], [s/t, b, h] with sequence parallelism
    if not stage.last:
        return output
    mask = batch["loss_mask"]  # [b, s]
    return (output * mask).sum(), mask.sum()


def train(config: RunConfig, observers: Sequence[Observer] = ()) -> Trainee:
    """Train as `config` says, on every rank of the launcher's world alike."""
    with mistakes():
        tokenizer = build_tokenizer(config.tokenizer)
        logits = config.model.vocabulary_rows(tokenizer.vocab_size)
    flops, executed = flops_per_sample(config, logits)
    return pretrain(
        config,
        model_provider=functools.partial(provide_model, config, tokenizer.vocab_size),
        dataset_provider=functools.partial(provide_datasets, config, tokenizer),
        forward_step=forward_step,
        vocab_size=tokenizer.vocab_size,
        flops_per_sample=flops,
        hardware_flops_per_sample=executed,
        observers=observers,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags and train; the user's mistakes end it with exit code 2 and a sentence for each."""
    with user_errors(TRAINING_LOST):
        train(parse_composed(RunConfig, argv, prog="pretrain_gpt.py"))


if __name__ == "__main__":
    main(sys.argv[1:])
