"""Pretrain a BERT: `torchrun --nproc-per-node N pretrain_bert.py FLAGS` (or plain `python` for one rank); see --help.

This file says what a BERT run is made of: its model, its data and its loss. The data is a set of sentences, as
`tools/preprocess_data.py --split-sentences` makes it.
"""

import functools
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.base.formulas import bert_head_flops
from megatron.data import BertIds, build_bert_datasets
from megatron.model import BertModel, BertOutput, Chunk, build_bert
from megatron.tokenizer import build_tokenizer
from megatron.training.arguments import parse_composed
from megatron.training.bert import BertRunConfig, vocabulary_ids
from megatron.training.failure import TRAINING_LOST, mistakes, user_errors
from megatron.training.flops import flops_per_sample
from megatron.training.launcher import local_rank
from megatron.training.loop import pretrain
from megatron.training.observers import Observer
from megatron.training.pipeline import Batch
from megatron.training.run import Datasets, SampleCounts
from megatron.training.state import Trainee


def provide_model(config: BertRunConfig, vocab_size: int, dtype: torch.dtype, device: torch.device) -> BertModel:
    """This rank's part of the model, its weights drawn from the seed alike for every layout."""
    return build_bert(
        config.model,
        vocab_size,
        config.training.seed,
        dtype=dtype,
        device=device,
        binary_head=not config.bert.bert_no_binary_head,
        sequence_parallel=config.distributed.sequence_parallel,
        recompute=config.recompute,
        stages=config.stages_of(mpu.get_pipeline_model_parallel_rank(), config.model.vocabulary_rows(vocab_size)),
    )


def provide_datasets(config: BertRunConfig, ids: BertIds, counts: SampleCounts) -> Datasets:
    """Training, validation and test sets for the samples that the run will ask; one rank of a node makes their maps."""
    return build_bert_datasets(
        config.data,
        config.bert,
        num_samples=counts,
        seed=config.training.seed,
        ids=ids,
        builds_indices=local_rank() == 0,
    )


# The losses that the loss is made of, as the log line calls them.
LOSSES = ("lm-loss", "sop-loss")


def forward_step(
    loss_normalization: str, stage: Chunk, batch: Batch
) -> tuple[Tensor, Tensor, Sequence[Tensor]] | Tensor:
    """Sum of the losses of a micro-batch, the number of its masked tokens, and the sum of each loss by itself.

    Hidden states before the last stage.

    The loss of a sample's order enters with the number of its masked tokens, so that one division by their number over
    the global batch gives the mean loss of masked tokens and a mean of the samples' order losses that depends on no
    micro-batch. With `loss_normalization` "microbatch" it enters with their mean over the micro-batch, which after the
    division within it is Megatron-LM's sum of both means.
    """
    output = stage(batch["tokens"], batch["types"], batch["padding_mask"], batch["labels"], hidden=batch.get("hidden"))
    return losses(output, batch, loss_normalization) if stage.last else output


def losses(output: BertOutput, batch: Batch, loss_normalization: str) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """What `forward_step` gives, from what the last stage gives. Without pairs there is one loss alone."""
    mask = batch["loss_mask"]  # [b, s]
    lm, counts = (output.lm * mask).sum(), mask.sum(1)  # [b]
    if output.binary is None:
        return lm, counts.sum(), ()
    order = F.cross_entropy(output.binary.to(output.lm.dtype), batch["is_random"], reduction="none")  # [b]
    sop = (order * (counts if loss_normalization == "tokens" else counts.mean())).sum()
    return lm + sop, counts.sum(), (lm, sop)


def train(config: BertRunConfig, observers: Sequence[Observer] = ()) -> Trainee:
    """Train as `config` says, on every rank of the launcher's world alike."""
    with mistakes():
        tokenizer = build_tokenizer(config.tokenizer)
        logits = config.model.vocabulary_rows(tokenizer.vocab_size)
        ids = vocabulary_ids(tokenizer)
    pairs = not config.bert.bert_no_binary_head
    heads = 3 * bert_head_flops(config.data.seq_length, config.model.hidden_size, binary_head=pairs)
    flops, executed = flops_per_sample(config, logits)
    return pretrain(
        config,
        model_provider=functools.partial(provide_model, config, tokenizer.vocab_size),
        dataset_provider=functools.partial(provide_datasets, config, ids),
        forward_step=functools.partial(forward_step, config.training.loss_normalization),
        vocab_size=tokenizer.vocab_size,
        flops_per_sample=flops + heads,
        hardware_flops_per_sample=executed + heads,
        observers=observers,
        loss_parts=LOSSES if pairs else (),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags and train; the user's mistakes end it with exit code 2 and a sentence for each."""
    with user_errors(TRAINING_LOST):
        train(parse_composed(BertRunConfig, argv, prog="pretrain_bert.py"))


if __name__ == "__main__":
    main(sys.argv[1:])
