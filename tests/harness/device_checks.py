"""What must hold on every kind of device; run on the CPU by the unit tests and on a GPU by `tests/gpu`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from tests.harness.closeness import assert_close

VOCAB, PADDED, HIDDEN, INNER, TOKENS = 61, 64, 32, 96, 40

# Largest difference from float64 against the largest value, by the dtype of parameters and activations.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class LanguageModel(nn.Module):
    """A small model of every mpu layer: embedding, a two-layer MLP, and the loss over the embedding's own weights."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        where = {"dtype": dtype, "device": device}
        self.embedding = mpu.VocabParallelEmbedding(PADDED, HIDDEN, real_num_embeddings=VOCAB, **where)  # type: ignore[arg-type]
        self.up = mpu.ColumnParallelLinear(HIDDEN, INNER, gather_output=False, **where)  # type: ignore[arg-type]
        self.down = mpu.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, **where)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, labels: Tensor, chunk_size: int | None) -> Tensor:
        """Ids [tokens] -> loss of each [tokens]."""
        hidden = self.embedding(tokens)  # [tokens, h]
        hidden = hidden + self.down(F.gelu(self.up(hidden)[0]))[0]
        if chunk_size is not None:
            return mpu.vocab_parallel_linear_cross_entropy(
                hidden, self.embedding.weight, labels, chunk_size=chunk_size, vocab_size=VOCAB
            )
        logits = mpu.parallel_linear(hidden, self.embedding.weight)
        return mpu.vocab_parallel_cross_entropy(logits, labels, vocab_size=VOCAB)


def serial_loss(weights: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    """The same model in torch.nn.functional alone."""
    embedding = weights["embedding.weight"][:VOCAB]
    hidden = F.embedding(tokens, embedding)
    inner = F.gelu(F.linear(hidden, weights["up.weight"], weights["up.bias"]))
    hidden = hidden + F.linear(inner, weights["down.weight"], weights["down.bias"])
    return F.cross_entropy(F.linear(hidden, embedding), labels, reduction="none")


def check_layers(device: torch.device, dtype: torch.dtype, chunk_size: int | None) -> None:
    """Loss and every gradient of the layers on `device` in `dtype`, against float64 on the CPU without mpu."""
    mpu.model_parallel_manual_seed(1)
    model = LanguageModel(dtype, device)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    generator = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(0, VOCAB, (2, TOKENS), generator=generator)
    twin = {name: p.detach().cpu().double().requires_grad_() for name, p in model.named_parameters()}

    loss = model(tokens.to(device), labels.to(device), chunk_size)
    assert loss.device.type == device.type
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.mean().backward()
    expected = serial_loss(twin, tokens, labels)
    expected.mean().backward()

    tolerance = TOLERANCES[dtype]
    assert_close(loss, expected, tolerance)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None and gradient.dtype == dtype for gradient in gradients.values())
    assert_close(gradients, {name: p.grad for name, p in twin.items()}, tolerance)


def check_streams(device: torch.device) -> None:
    """The tracker's stream on `device`: its own, continued at the next fork, brought back by the saved state."""
    mpu.model_parallel_manual_seed(3)
    torch.empty(1, device=device)

    def draw() -> Tensor:
        return torch.rand(1000, device=device)

    def draw_from_stream() -> Tensor:
        with mpu.get_rng_tracker().fork():
            return draw()

    saved = mpu.rng_state()
    first, outside, second = draw_from_stream(), draw(), draw_from_stream()
    assert not torch.equal(first, second)
    assert not torch.equal(first, outside)
    mpu.set_rng_state(saved)
    assert torch.equal(draw(), outside), "a fork moved the default stream"
    assert torch.equal(draw_from_stream(), first)
    assert torch.equal(draw_from_stream(), second)


def check_recompute(device: torch.device, dtype: torch.dtype) -> None:
    """Recomputing with dropout from both streams gives the same loss and gradients, bit for bit."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(HIDDEN, HIDDEN, generator=generator).to(device, dtype)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, dtype)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        with mpu.get_rng_tracker().fork():
            x = F.dropout(x, 0.5)
        return F.dropout(F.gelu(F.linear(x, weight)), 0.5)

    results = []
    for recompute in (False, True):
        mpu.model_parallel_manual_seed(5)
        mine, its_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = mpu.checkpoint(block, mine, its_weight) if recompute else block(mine, its_weight)
        out.float().square().sum().backward()
        assert mine.grad is not None
        assert its_weight.grad is not None
        results.append((out.detach(), mine.grad, its_weight.grad, torch.rand(10, device=device)))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)
    assert (results[0][0] == 0).any(), "dropout dropped nothing"


def check_collectives(device: torch.device) -> None:
    """A world of one on the device's own backend: groups are made, collectives leave one rank's values as they are."""
    x = torch.arange(12.0, device=device).view(4, 3)
    expected = x.clone()
    dist.all_reduce(x)
    assert torch.equal(x, expected)
    for group in (mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group()):
        assert torch.equal(mpu.all_reduce(x.clone(), group), expected)
        assert torch.equal(mpu.all_gather_first_dim(x, group), expected)
        assert torch.equal(mpu.reduce_scatter_first_dim(x, group), expected)
    batch = {"tokens": torch.arange(6, device=device).view(2, 3)}
    received = mpu.broadcast_data(["tokens"], batch, torch.int64)
    assert torch.equal(received["tokens"], batch["tokens"])
    assert received["tokens"].device.type == device.type
