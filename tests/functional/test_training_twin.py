"""`pretrain` against a plain loop in PyTorch over Hugging Face's GPT-2: losses, gradient norms and final weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

import pretrain_gpt
from megatron.data import build_gpt_datasets
from megatron.model import GPTModel
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.loop import pretrain
from tests.harness.closeness import assert_close
from tests.harness.hf_gpt2 import as_ours, random_gpt2
from tests.harness.ranks import Ranks
from tests.harness.runs import EOD, VOCAB_SIZE, Outcome, Recorder, assemble, flags, outcome_of, write_documents
from tests.harness.whole_tensors import load_whole

ITERATIONS, BATCH, WARMUP = 8, 8, 2
LR, MIN_LR, DECAY, CLIP = 1e-2, 1e-3, 0.1, 0.5


def words(data_path: str, tensor: int) -> list[str]:
    return flags(
        data_path,
        tensor_model_parallel_size=tensor,
        train_iters=ITERATIONS,
        global_batch_size=BATCH,
        lr=LR,
        min_lr=MIN_LR,
        lr_warmup_iters=WARMUP,
        weight_decay=DECAY,
        clip_grad=CLIP,
        eod_mask_loss=True,
        params_dtype="float64",
        eval_iters=0,
    )


def theirs_at_start(config: RunConfig) -> GPT2LMHeadModel:
    return random_gpt2(config.model, VOCAB_SIZE, seed=5).double()


def run_ours(rank: int, world_size: int, data_path: str) -> Outcome:
    """Pretrain from the weights of Hugging Face's model."""
    config = parse_composed(RunConfig, words(data_path, world_size), world_size=world_size)
    recorder = Recorder()

    def provide(dtype: torch.dtype, device: torch.device) -> nn.Module:
        model = GPTModel(config.model, VOCAB_SIZE, dtype=dtype, device=device)
        load_whole(model, as_ours(config.model, theirs_at_start(config).state_dict()))
        return model

    trainee = pretrain(
        config,
        model_provider=provide,
        dataset_provider=lambda counts: build_gpt_datasets(config.data, num_samples=counts, seed=1234, eod_id=EOD),
        forward_step=pretrain_gpt.forward_step,
        vocab_size=VOCAB_SIZE,
        observers=[recorder],
    )
    return outcome_of(trainee, recorder)


def lr_of(iteration: int) -> float:
    """Linear warm-up, cosine decay to the end, both by what was consumed before the iteration (from 0)."""
    if iteration < WARMUP:
        return LR * iteration / WARMUP
    progress = (iteration - WARMUP) / (ITERATIONS - WARMUP)
    return MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * progress))


def plain_loop(config: RunConfig) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same training with nothing of ours but the dataset."""
    model = theirs_at_start(config)
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    dataset = build_gpt_datasets(config.data, num_samples=(ITERATIONS * BATCH, 0, 0), seed=1234, eod_id=EOD)[0]
    assert dataset is not None
    losses, norms = [], []
    for iteration in range(ITERATIONS):
        samples = [dataset[i] for i in range(iteration * BATCH, (iteration + 1) * BATCH)]
        tokens, labels = (torch.stack([torch.from_numpy(s[k]) for s in samples]) for k in ("tokens", "labels"))
        counted = tokens != EOD
        loss = F.cross_entropy(model(tokens).logits[counted], labels[counted])
        model.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, CLIP).item())
        for group in optimizer.param_groups:
            group["lr"] = lr_of(iteration)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, as_ours(config.model, model.state_dict())


@pytest.mark.parametrize("tensor", [1, 2])
def test_pretrain_equals_a_plain_loop(ranks: Ranks, tmp_path: Path, tensor: int) -> None:
    data_path = write_documents(tmp_path / "documents")
    losses, norms, weights = plain_loop(parse_composed(RunConfig, words(data_path, 1), world_size=1))
    assert max(norms) > CLIP > 0  # clipping was at work
    outcomes = ranks(tensor, run_ours, data_path)
    assert_close(outcomes[0].series("loss"), losses, 1e-10)
    assert_close(outcomes[0].series("grad-norm"), norms, 1e-8)
    assert outcomes[0].series("lr") == pytest.approx([lr_of(i) for i in range(ITERATIONS)], rel=1e-12)
    ours = {name: values for name, values in assemble(outcomes).items() if not name.startswith("optimizer.")}
    assert_close(ours, weights, 1e-7, floor=1e-2)
