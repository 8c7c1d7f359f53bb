"""What must hold of training on every kind of device: whole runs, and the fast form of a thing against its plain form.

Run on the CPU by `tests/distributed/test_training_checks.py` and on a GPU by `tests/gpu`.
"""

import dataclasses

import torch
import torch.nn.functional as F

import pretrain_gpt
from megatron.base.activations import activation_bytes
from megatron.model import BertModel, RecomputeConfig, TransformerConfig, build_bert, build_gpt
from megatron.model.norm import layer_norm
from megatron.optimizer.adam import make_updater
from megatron.optimizer.config import OptimizerConfig
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from tests.harness.closeness import assert_close
from tests.harness.runs import Recorder, flags

# Largest difference of a run's losses from those of the float32 run, against the largest loss.
CURVE_TOLERANCES = {"bf16": 5e-3, "fp16": 2e-3}
# Largest difference of two ways to compute the same in one dtype, against the largest value.
KERNEL_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def loss_curve(data_path: str, backend: str, **changes: object) -> list[float]:
    """Losses of a run by the flags of `tests.harness.runs` and `changes`, on the process groups that exist."""
    recorder = Recorder()
    words = flags(data_path, distributed_backend=backend, **changes)
    pretrain_gpt.train(parse_composed(RunConfig, words, world_size=1), [recorder])
    return [step["loss"] for step in recorder.steps]


def check_precision(data_path: str, backend: str, precision: str, **size: object) -> None:
    """A 16-bit run follows the float32 run of the same weights and samples, which learns."""
    expected = loss_curve(data_path, backend, **size)
    low = {"fp16": True, "initial_loss_scale": 2.0**12} if precision == "fp16" else {precision: True}
    actual = loss_curve(data_path, backend, **size, **low)
    assert expected[-1] < 0.95 * expected[0], "the float32 run learnt nothing, so that any curve would be like it"
    assert actual != expected, "the 16-bit run calculated in float32"
    assert_close(torch.tensor(actual), torch.tensor(expected), CURVE_TOLERANCES[precision])


def check_sharded_optimizer(data_path: str, backend: str, tolerance: float, **size: object) -> None:
    """Sharding over one rank, with both overlaps, changes no loss by more than `tolerance`; nor does recomputation."""
    expected = torch.tensor(loss_curve(data_path, backend, **size))
    sharded = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    for changes in ({"overlap_grad_reduce": True}, sharded, {"recompute_granularity": "full"}):
        assert_close(torch.tensor(loss_curve(data_path, backend, **size, **changes)), expected, tolerance)


def check_attention(device: torch.device, dtype: torch.dtype, sizes: TransformerConfig) -> None:
    """A GPT's losses and gradients with PyTorch's kernel and with the s x s matrix written out."""
    results = []
    for backend in ("fused", "unfused"):
        config = dataclasses.replace(sizes, attention_backend=backend, attention_dropout=0.0, hidden_dropout=0.0)
        model = build_gpt(config, 100, 1, dtype=dtype, device=device)
        tokens = torch.randint(0, 100, (2, config.max_position_embeddings), generator=torch.Generator().manual_seed(2))
        losses = model(tokens.to(device), labels=tokens.roll(1, 1).to(device))  # [b, s]
        losses.mean().backward()
        results.append((losses, {name: p.grad for name, p in model.named_parameters()}))
    largest = max(g.abs().max().item() for g in results[1][1].values() if g is not None)
    assert_close(results[0], results[1], KERNEL_TOLERANCES[dtype], floor=largest)


def check_padding(device: torch.device, dtype: torch.dtype, sizes: TransformerConfig) -> None:
    """A BERT's losses and gradients over padded samples, whose real tokens see no padding, with both kernels."""
    results = []
    length = sizes.max_position_embeddings
    for backend in ("fused", "unfused"):
        config = dataclasses.replace(sizes, attention_backend=backend, attention_dropout=0.0, hidden_dropout=0.0)
        model: BertModel = build_bert(config, 100, 1, dtype=dtype, device=device)
        tokens = torch.randint(0, 100, (3, length), generator=torch.Generator().manual_seed(2)).to(device)
        real = torch.arange(length, device=device) < torch.tensor([[length], [length // 2 + 1], [3]], device=device)
        lm, order = model(tokens, padding_mask=real, labels=tokens.roll(1, 1).where(real, -1))  # [b, s], [b, 2]
        (lm.sum() / real.sum() + order.float().sin().sum()).backward()
        results.append((lm, order, {name: p.grad for name, p in model.named_parameters()}))
        other = model(tokens.where(real, 7), padding_mask=real, labels=tokens.roll(1, 1).where(real, -1))
        assert_close(other.lm, lm, KERNEL_TOLERANCES[dtype])
    largest = max(g.abs().max().item() for g in results[1][2].values() if g is not None)
    assert_close(results[0], results[1], KERNEL_TOLERANCES[dtype], floor=largest)


def check_norm(device: torch.device, dtype: torch.dtype) -> None:
    """The norm that is used on `device`, its result and gradients, against float64 on the CPU."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in ((50, 768), (768,), (768,))]
    theirs = [v.double().requires_grad_() for v in values]
    mine = [v.to(device).requires_grad_() for v in values]
    actual = layer_norm(mine[0], mine[1], mine[2], 1e-5)
    expected = F.layer_norm(theirs[0], (768,), theirs[1], theirs[2], 1e-5)
    assert actual.dtype == dtype
    upwards = torch.randn(expected.shape, generator=generator).to(dtype)
    actual.backward(upwards.to(device))
    expected.backward(upwards.double())
    assert_close(actual, expected, KERNEL_TOLERANCES[dtype])
    assert_close([v.grad for v in mine], [v.grad for v in theirs], KERNEL_TOLERANCES[dtype])


def check_adam(device: torch.device) -> None:
    """Steps of the AdamW that is used on `device` against PyTorch's foreach form in float64 on the CPU."""
    generator = torch.Generator().manual_seed(4)
    values = [torch.randn(shape, generator=generator) for shape in ((300, 40), (7,), (40,))]
    theirs = [v.double().requires_grad_() for v in values]
    mine = [v.to(device) for v in values]
    config = OptimizerConfig(weight_decay=0.1)
    updater = make_updater(mine[:1], mine[1:], config)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(config.adam_beta1, config.adam_beta2), foreach=True)
    for _ in range(5):
        gradients = [torch.randn(v.shape, generator=generator) for v in values]
        updater.step(1e-2, [g.to(device) for g in gradients])
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.double()
        plain.step()
    assert_close(mine, theirs, 1e-5)
    state = {name: [plain.state[p][name] for p in theirs] for name in ("exp_avg", "exp_avg_sq")}
    assert_close(updater.state, state, 1e-5)


def check_recompute_memory(device: torch.device, sizes: TransformerConfig, batch: int) -> None:
    """What a GPU's allocator has given out, in float16, is what `activation_bytes` says, for each granularity.

    Kept after the forward pass within 5 %. At the peak, with whole layers recomputed, one layer more, and the gradients
    in the middle of its backward pass, which are less than another.
    """
    whole = _formula(sizes, batch, None)
    for granularity in (None, "selective", "full"):
        recompute = RecomputeConfig(recompute_granularity=granularity)
        kept, peak = _memory_of_layers(device, sizes, batch, recompute)
        expected = sizes.num_layers * _formula(sizes, batch, granularity)
        assert abs(kept - expected) <= 0.05 * expected, f"{granularity}: {kept} bytes are kept, expected {expected}"
        on_top = whole if granularity == "full" else 0
        assert expected + 0.9 * on_top <= peak <= expected + on_top + whole, f"{granularity}: {peak} bytes at the peak"


def _formula(sizes: TransformerConfig, batch: int, granularity: str | None) -> int:
    return activation_bytes(
        sizes.max_position_embeddings,
        batch,
        sizes.hidden_size,
        sizes.num_attention_heads,
        recompute=granularity,
        fused_attention=sizes.attention_backend == "fused",
        attention_dropout=sizes.attention_dropout > 0,
    )


def _memory_of_layers(
    device: torch.device, sizes: TransformerConfig, batch: int, recompute: RecomputeConfig
) -> tuple[int, int]:
    """Bytes of the layers' activations after the forward pass, and the most of forward and backward together."""
    layers = build_gpt(sizes, 64, 5, dtype=torch.float16, device=device, recompute=recompute).transformer
    shape = (sizes.max_position_embeddings, batch, sizes.hidden_size)
    for _ in range(2):  # in the first pass gradients and the workspaces of the libraries are allocated
        hidden = torch.randn(shape, device=device, dtype=torch.float16, requires_grad=True)
        hidden.grad = torch.zeros_like(hidden)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        out = layers(hidden)
        kept = torch.cuda.memory_allocated(device) - before
        out.backward(torch.ones_like(out))
        peak = torch.cuda.max_memory_allocated(device) - before
        del out
    # The last layer's output, which the final norm keeps, and the norm's own, less the first layer's input.
    return kept - 2 * hidden.numel(), peak - 2 * hidden.numel()
