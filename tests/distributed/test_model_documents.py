"""Documents that do not see each other: the GPT without a mask against the serial twin with a plain s x s one."""

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.model import GPTModel, TransformerConfig, gather_logits
from megatron.model.documents import as_document_lengths
from tests.harness import serial_gpt
from tests.harness.closeness import assert_close
from tests.harness.ranks import Ranks
from tests.harness.serial_gpt import Weights, linear, random_weights
from tests.harness.whole_tensors import load_whole, whole_gradients

VOCAB = 61
LENGTHS = [[11], [1, 4, 6], [2, 1, 1, 3, 4]]  # of the documents in three samples of 11 tokens


def config(norm_position: str, dropout: float = 0.0, backend: str = "fused") -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        max_position_embeddings=16,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        norm_position=norm_position,
        attention_backend=backend,
    )


def padded(lengths: list[list[int]], s: int = 11) -> Tensor:
    return torch.tensor([row + [0] * (s - len(row)) for row in lengths], dtype=torch.int32)


def visible(lengths: list[list[int]]) -> Tensor:
    """The mask [b, s, s]: a position sees itself and what is before it in its own document."""
    masks = []
    for row in lengths:
        document = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
        masks.append((document[:, None] == document[None, :]).tril())
    return torch.stack(masks)


def masked_attention(config: TransformerConfig, weights: Weights, prefix: str, x: Tensor, causal: bool) -> Tensor:
    """As that of the serial twin, with the mask written out."""
    d, contexts = config.head_size, []
    fused = linear(weights, f"{prefix}query_key_value", x)
    for head in range(config.num_attention_heads):
        query, key, value = fused[..., 3 * d * head : 3 * d * (head + 1)].split(d, dim=-1)
        scores = (query @ key.transpose(1, 2) / math.sqrt(d)).masked_fill(~visible(LENGTHS), -math.inf)
        contexts.append(scores.softmax(-1) @ value)
    return linear(weights, f"{prefix}dense", torch.cat(contexts, dim=-1))


def ids(seed: int) -> Tensor:
    return torch.randint(VOCAB, (3, 11), generator=torch.Generator().manual_seed(seed))


def compare(rank: int, world_size: int, norm_position: str, recomputed: bool, backend: str = "fused") -> None:
    mpu.initialize_model_parallel(world_size)
    chosen = config(norm_position, backend=backend)
    model = GPTModel(chosen, VOCAB, dtype=torch.float64)
    shapes = {name: sharding.global_shape for name, sharding in mpu.parameter_shardings(model).items()}
    weights = random_weights(shapes, 3, torch.float64)
    load_whole(model, weights)
    for weight in weights.values():
        weight.requires_grad_()
    with mock.patch.object(serial_gpt, "attention", masked_attention):
        expected_logits = serial_gpt.serial_logits(chosen, weights, ids(1))
        expected = serial_gpt.serial_losses(chosen, weights, ids(1), ids(2))
    logits = gather_logits(model(ids(1), document_lengths=padded(LENGTHS)), VOCAB)
    assert_close(logits.detach(), expected_logits.detach(), 1e-12)

    def losses(tokens: Tensor, lengths: Tensor) -> Tensor:
        return model(tokens, labels=ids(2), document_lengths=lengths)

    lengths = padded(LENGTHS)
    actual = mpu.checkpoint(losses, ids(1), lengths) if recomputed else losses(ids(1), lengths)
    assert_close(actual.detach(), expected.detach(), 1e-12)
    expected.sum().backward()
    actual.sum().backward()
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in whole_gradients(model).items():
        assert_close(gradient, gradients[name], 1e-11, floor=largest)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_equal_to_a_plain_mask(ranks: Ranks, tensor: int, norm_position: str, recomputed: bool) -> None:
    ranks(tensor, compare, norm_position, recomputed)


def test_equal_to_a_plain_mask_without_the_kernel(ranks: Ranks) -> None:
    ranks(2, compare, "pre", False, "unfused")


def test_a_token_reaches_its_own_document_alone() -> None:
    """With positions that begin anew, each document is as if it stood alone; exactly, with dropout off."""
    mpu.model_parallel_manual_seed(1)
    model = GPTModel(config("pre", dropout=0.5), VOCAB, dtype=torch.float64).eval()
    positions = torch.tensor([[k for length in row for k in range(length)] for row in LENGTHS])
    together = model(ids(1), positions, document_lengths=padded(LENGTHS))
    for row, tokens, logits in zip(LENGTHS, ids(1), together, strict=True):
        for document, mine in zip(tokens.split(row), logits.split(row), strict=True):
            assert_close(mine, model(document[None])[0], 1e-12)


def test_no_square_matrix_is_handed_to_the_kernel() -> None:
    mpu.model_parallel_manual_seed(1)
    model = GPTModel(config("pre"), VOCAB)
    kernel = torch.nn.functional.scaled_dot_product_attention
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", side_effect=kernel) as called:
        model(ids(1), document_lengths=padded(LENGTHS))
    documents = sum(map(len, LENGTHS))
    assert called.call_count == 2 * documents
    for call in called.call_args_list:
        assert call.kwargs == {"attn_mask": None, "dropout_p": 0.0, "is_causal": True}


def test_one_document_a_sample_is_the_plain_model() -> None:
    assert as_document_lengths(padded([[11]] * 3), ids(1)) is None
    assert as_document_lengths(None, ids(1)) is None
    assert as_document_lengths(padded(LENGTHS), ids(1)) == LENGTHS


@pytest.mark.parametrize("row", [[10], [12], [5, 0, 6], [0, 11], [12, -1]])
def test_lengths_that_do_not_fit_are_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match="add up to 11"):
        as_document_lengths(padded([[11], [11], row]), ids(1))


def test_lengths_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="document_lengths of shape"):
        as_document_lengths(padded([[11]]), ids(1))
