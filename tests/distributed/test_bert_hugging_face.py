"""The BERT against Hugging Face's with the same random weights: all logits and every gradient, padded batches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron import mpu
from megatron.model import TransformerConfig, gather_logits
from tests.harness.bert_stages import VOCAB, S, batch, build, gradients, load, run
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks

TOL = 1e-5
LAYERS = 3


def config(**changes: Any) -> TransformerConfig:
    quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "activation": "gelu_erf", "norm_position": "post"}
    sizes = {"num_layers": LAYERS, "hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": S}
    return TransformerConfig(**(sizes | quiet | {"layernorm_epsilon": 1e-12} | changes))


# layers of each stage of a pipeline, further choices of the model, sequence parallelism; on how many tensor ranks
LAYOUTS: dict[str, tuple[int, tuple[int, ...], dict[str, Any], bool]] = {
    "serial": (1, (), {"attention_backend": "unfused"}, False),
    "tensor 2": (2, (), {}, False),
    "pipeline 2": (1, (1, 2), {"cross_entropy_chunk_size": 20}, False),
    "tensor 2, pipeline 2": (2, (2, 1), {"attention_backend": "unfused"}, False),
    "sequence parallel": (2, (1, 2), {}, True),
}


def ours(
    rank: int, size: int, weights: dict[str, Any], counts: tuple[int, ...], changes: dict[str, Any], shards: bool
) -> tuple[Any, Any, Any, dict[str, Any]]:
    mpu.initialize_model_parallel(size)
    stages = len(counts) or 1
    models = build(config(**changes), counts, stages, dtype=torch.float32, sequence_parallel=shards)
    load(models, {name: torch.from_numpy(weight) for name, weight in weights.items()})
    given = batch()
    labels, order, inputs = given["labels"], given["order"], (given["tokens"], given["types"], given["padding_mask"])
    logits = gather_logits(run(models, *inputs).lm, VOCAB)
    losses, binary = run(models, *inputs, labels)
    loss = losses.sum() / (labels >= 0).sum() + F.cross_entropy(binary, order)
    loss.backward()
    found = {name: gradient.numpy() for name, gradient in gradients(models).items()}
    return logits.detach().numpy(), binary.detach().numpy(), loss.item(), found


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """Their weights by our names, and what they give: logits, loss and gradients by our names."""
    from tests.harness.hf_bert import as_ours, random_bert  # here, so that the ranks do not load transformers

    model, given = random_bert(config(), VOCAB, seed=3), batch()
    output = model(
        given["tokens"],
        attention_mask=given["padding_mask"],
        token_type_ids=given["types"],
        labels=given["labels"].where(given["labels"] >= 0, -100),
        next_sentence_label=given["order"],
    )
    output.loss.backward()
    parameters = dict(model.named_parameters())
    weights = as_ours(config(), {name: p.detach() for name, p in parameters.items()})
    assert sum(weight.numel() for weight in weights.values()) == sum(p.numel() for p in parameters.values())
    return {
        "weights": {name: weight.numpy() for name, weight in weights.items()},
        "logits": output.prediction_logits.detach(),
        "binary": output.seq_relationship_logits.detach(),
        "loss": output.loss.item(),
        "gradients": as_ours(config(), {name: p.grad for name, p in parameters.items() if p.grad is not None}),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients(ranks: Ranks, theirs: dict[str, Any], layout: str) -> None:
    size, *how = LAYOUTS[layout]
    floor = max(gradient.abs().max().item() for gradient in theirs["gradients"].values())
    for logits, binary, loss, found in ranks(size, ours, theirs["weights"], *how):
        assert_close(logits, theirs["logits"], TOL)
        assert_close(binary, theirs["binary"], TOL)
        assert_close(loss, theirs["loss"], TOL)
        assert_close(found, theirs["gradients"], TOL, floor)
