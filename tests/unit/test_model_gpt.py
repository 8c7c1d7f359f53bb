"""The GPT in one process: against its serial twin, its parameter count, its names, its complaints."""

import copy
import math

import pytest
import torch
from torch import Tensor

from megatron import mpu
from megatron.base.formulas import gpt_parameters
from megatron.model import GPTModel, TransformerConfig, build_gpt, gather_logits
from megatron.model.attention import SelfAttention
from megatron.model.layer import transformer_layer
from tests.harness.closeness import assert_close
from tests.harness.serial_gpt import random_weights, serial_logits, serial_losses
from tests.harness.whole_tensors import load_whole, whole_gradients

VOCAB = 61


def config(**changes: object) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "max_position_embeddings": 16}
    quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "make_vocab_size_divisible_by": 16}
    return TransformerConfig(**(sizes | quiet | changes))  # type: ignore[arg-type]


def model_and_weights(
    chosen: TransformerConfig, dtype: torch.dtype = torch.float64
) -> tuple[GPTModel, dict[str, Tensor]]:
    model = build_gpt(chosen, VOCAB, 1, dtype=dtype, device="cpu")
    shapes = {name: sharding.global_shape for name, sharding in mpu.parameter_shardings(model).items()}
    weights = random_weights(shapes, 3, dtype)
    load_whole(model, weights)
    return model, {name: weight.requires_grad_() for name, weight in weights.items()}


def ids(seed: int = 0, length: int = 11) -> Tensor:
    return torch.randint(VOCAB, (3, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_position": "post"},
        {"attention_backend": "unfused"},
        {"untie_embeddings_and_output_weights": True},
    ],
)
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_losses_and_gradients_equal_the_serial_twin(
    changes: dict[str, object], activation: str, dtype: torch.dtype, tol: float
) -> None:
    chosen = config(activation=activation, kv_channels=10, ffn_hidden_size=20, **changes)
    model, weights = model_and_weights(chosen, dtype)
    losses, expected = model(ids(0), labels=ids(1)), serial_losses(chosen, weights, ids(0), ids(1))
    assert losses.dtype == dtype
    assert_close(losses, expected, tol)
    expected.square().sum().backward()
    losses.square().sum().backward()
    gradients = {name: weight.grad for name, weight in weights.items()}
    floor = max(gradient.abs().max().item() for gradient in gradients.values() if gradient is not None)
    assert_close(whole_gradients(model), gradients, tol, floor)


def test_logits_equal_the_serial_twin_and_padding_columns_are_cut() -> None:
    model, weights = model_and_weights(config())
    logits = model(ids())
    assert logits.shape == (3, 11, 64)
    assert torch.count_nonzero(logits[..., VOCAB:]) == 0
    assert_close(gather_logits(logits, VOCAB), serial_logits(config(), weights, ids()), 1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 33, 1000])
def test_chunks_of_the_loss_change_nothing(chunk: int) -> None:
    model, weights = model_and_weights(config(cross_entropy_chunk_size=chunk))
    expected = serial_losses(config(), weights, ids(0), ids(1))
    losses = model(ids(0), labels=ids(1))
    assert_close(losses, expected, 1e-12)
    expected.square().sum().backward()
    losses.square().sum().backward()
    assert_close(whole_gradients(model), {name: weight.grad for name, weight in weights.items()}, 1e-12, 1e-3)


def test_a_negative_label_does_not_count() -> None:
    model, weights = model_and_weights(config())
    labels = ids(1)
    labels[:, ::2] = -1
    expected = serial_losses(config(), weights, ids(0), labels.clamp(min=0)) * (labels >= 0)
    losses = model(ids(0), labels=labels)
    assert_close(losses, expected, 1e-12)
    expected.sum().backward()
    losses.sum().backward()
    assert_close(whole_gradients(model), {name: weight.grad for name, weight in weights.items()}, 1e-12, 1e-3)


def test_loss_of_bfloat16_is_float32() -> None:
    model = build_gpt(config(), VOCAB, 1, dtype=torch.bfloat16, device="cpu")
    single = build_gpt(config(), VOCAB, 1, dtype=torch.float32, device="cpu")
    losses = model(ids(0), labels=ids(1))
    assert losses.dtype == torch.float32
    assert model(ids()).dtype == torch.bfloat16
    assert_close(losses, single(ids(0), labels=ids(1)), 0.02)


def test_position_ids() -> None:
    model, _ = model_and_weights(config())
    counted = torch.arange(11).expand(3, 11)
    assert torch.equal(model(ids(), counted), model(ids()))
    shifted = torch.stack([torch.arange(11), torch.arange(11) + 2, torch.arange(11).flip(0)])
    assert torch.equal(model(ids(), shifted)[0], model(ids())[0])
    assert not torch.allclose(model(ids(), shifted)[1:], model(ids())[1:])


def test_a_position_does_not_see_what_comes_after_it() -> None:
    model, _ = model_and_weights(config())
    changed = ids().clone()
    changed[:, 6] = (changed[:, 6] + 1) % VOCAB
    before, after = model(ids()), model(changed)
    assert_close(after[:, :6], before[:, :6], 1e-12)
    assert (after[:, 6:] - before[:, 6:]).abs().amax(-1).min() > 1e-6


def test_attention_that_is_not_causal_sees_everything() -> None:
    torch.manual_seed(0)
    attention = SelfAttention(config(), causal=False, dtype=torch.float64)
    hidden = torch.randn(5, 2, 24, dtype=torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert_close(attention(hidden[order])[0], attention(hidden)[0][order], 1e-12)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"kv_channels": 10, "ffn_hidden_size": 20}])
def test_parameter_count_is_the_formula(norm_position: str, untied: bool, sizes: dict[str, int]) -> None:
    chosen = config(norm_position=norm_position, untie_embeddings_and_output_weights=untied, **sizes)
    model = GPTModel(chosen, VOCAB, device="meta")
    counted = sum(torch.Size(sharding.global_shape).numel() for sharding in mpu.parameter_shardings(model).values())
    shape = (2, 24, VOCAB, 16, chosen.ffn_size, chosen.projection_size)
    assert counted == gpt_parameters(*shape, final_norm=norm_position == "pre", untied=untied)


def names_of(chosen: TransformerConfig) -> list[str]:
    return [name for name, _ in GPTModel(chosen, VOCAB, device="meta").named_parameters()]


def test_names_and_their_order() -> None:
    layer = [
        f"{module}.{kind}"
        for module in (
            "input_layernorm",
            "self_attention.query_key_value",
            "self_attention.dense",
            "post_attention_layernorm",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        )
        for kind in ("weight", "bias")
    ]
    assert names_of(config()) == [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        *(f"transformer.layers.{number}.{name}" for number in (0, 1) for name in layer),
        "transformer.final_layernorm.weight",
        "transformer.final_layernorm.bias",
    ]


def test_untied_output_weights_come_last() -> None:
    assert names_of(config(untie_embeddings_and_output_weights=True)) == [*names_of(config()), "output_layer.weight"]


def test_post_norm_has_no_final_norm() -> None:
    names = names_of(config(norm_position="post"))
    assert not any("final_layernorm" in name or "input_layernorm" in name for name in names)
    assert "transformer.layers.1.post_mlp_layernorm.weight" in names


def test_built_without_meta_the_model_is_drawn_too() -> None:
    torch.manual_seed(0)
    for name, parameter in GPTModel(config(), VOCAB).named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert name.endswith("bias") or torch.count_nonzero(parameter) > 0, name


def test_a_copy_computes_the_same() -> None:
    model, _ = model_and_weights(config())
    assert torch.equal(copy.deepcopy(model)(ids(0), labels=ids(1)), model(ids(0), labels=ids(1)))


def test_no_s_by_s_tensor_is_kept() -> None:
    """Without attention dropout; s is far above every other size, so that an s x s tensor would be the largest."""
    s = 192
    model = build_gpt(config(max_position_embeddings=s), VOCAB, 1, dtype=torch.float32, device="cpu")
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    tokens = torch.zeros(1, s, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, labels=tokens)
    assert s * 96 <= max(kept) < s * s


def test_a_layer_run_again_in_the_backward_pass_drops_the_same() -> None:
    loud = config(attention_dropout=0.3, hidden_dropout=0.3)
    gradients = []
    for again in (False, True):
        mpu.model_parallel_manual_seed(1)
        layer = transformer_layer(loud, causal=True, dtype=torch.float32)
        hidden = torch.linspace(-1, 1, 11 * 3 * 24).view(11, 3, 24).requires_grad_()
        output = mpu.checkpoint(layer, hidden) if again else layer(hidden)
        output.square().sum().backward()
        gradients.append([hidden.grad] + [parameter.grad for parameter in layer.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None and recomputed is not None
        assert torch.equal(plain, recomputed)


def test_a_state_dict_goes_from_one_model_to_another() -> None:
    model, _ = model_and_weights(config())
    other = build_gpt(config(), VOCAB, 2, dtype=torch.float64, device="cpu")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids(0), labels=ids(1)), model(ids(0), labels=ids(1)))


def test_evaluation_drops_nothing_and_draws_nothing() -> None:
    model = build_gpt(config(attention_dropout=0.5, hidden_dropout=0.5), VOCAB, 1, dtype=torch.float64, device="cpu")
    quiet = build_gpt(config(), VOCAB, 1, dtype=torch.float64, device="cpu")
    mpu.model_parallel_manual_seed(1)
    before = mpu.rng_state()
    assert torch.equal(model.eval()(ids()), quiet(ids()))
    after = mpu.rng_state()
    assert all(torch.equal(state, after[name]) for name, state in before.items())


@pytest.mark.parametrize("kind", ["attention_dropout", "hidden_dropout"])
def test_training_drops(kind: str) -> None:
    model = build_gpt(config(**{kind: 0.5}), VOCAB, 1, dtype=torch.float64, device="cpu")
    mpu.model_parallel_manual_seed(1)
    first, second = model(ids()), model(ids())
    mpu.model_parallel_manual_seed(1)
    assert not torch.equal(first, second)
    assert torch.equal(model(ids()), first)


@pytest.mark.parametrize(("norm_position", "outcomes"), [("pre", 3), ("post", 4)])
def test_a_layer_drops_before_both_of_its_additions(norm_position: str, outcomes: int) -> None:
    """With zero matrices attention and MLP give their biases, 1 everywhere: each is kept (as 2) or dropped.

    Pre-norm adds them up to 0, 2 or 4. Post-norm norms the first before the second is added, so that four pairs differ.
    """
    layer = transformer_layer(config(hidden_dropout=0.5, norm_position=norm_position), causal=True, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "layernorm" not in name:
                parameter.fill_(1.0 if name in ("self_attention.dense.bias", "mlp.dense_4h_to_h.bias") else 0.0)
    torch.manual_seed(0)
    row = layer(torch.zeros(1, 1, 24, dtype=torch.float64)).flatten()
    assert len(row.mul(1e6).round().unique()) == outcomes


def test_signature_tells_models_and_vocabularies_apart() -> None:
    signature = GPTModel(config(), VOCAB, device="meta").signature()
    assert signature["model"] == "gpt" and signature["vocab_size"] == VOCAB
    assert signature != GPTModel(config(), VOCAB + 1, device="meta").signature()


@pytest.mark.parametrize(
    ("tokens", "positions", "labels", "message"),
    [
        (torch.zeros(1, 17, dtype=torch.long), None, None, "17 tokens: --max-position-embeddings 16"),
        (torch.tensor([[0, VOCAB]]), None, None, "token id 61: it must be at least 0 and below the vocabulary size 61"),
        (torch.tensor([[0, -1]]), None, None, "token id -1: it must be at least 0 and below the vocabulary size 61"),
        (torch.tensor([[0, 1]]), torch.tensor([[0, 16]]), None, "position 16: --max-position-embeddings 16"),
        (torch.tensor([[0, 1]]), torch.tensor([[0, 1.5]]), None, r"positions of torch\.float32: ids must be integers"),
        (torch.tensor([[0, 1.5]]), None, None, r"token ids of torch\.float32: ids must be integers"),
        (
            torch.tensor([[0, 1]]),
            None,
            torch.tensor([[0, VOCAB]]),
            r"target 61: it must be negative \(not counted\) or below the vocabulary size 61",
        ),
        (torch.zeros(4, dtype=torch.long), None, None, r"tokens of shape \(4,\): they must be \[b, s\]"),
        (
            torch.zeros(2, 3, dtype=torch.long),
            None,
            torch.zeros(3, 2, dtype=torch.long),
            r"labels of shape \(3, 2\): the tokens have \(2, 3\)",
        ),
        (
            torch.zeros(2, 3, dtype=torch.long),
            torch.arange(3),
            None,
            r"position_ids of shape \(3,\): the tokens have \(2, 3\)",
        ),
    ],
)
def test_ids_out_of_range(tokens: Tensor, positions: Tensor | None, labels: Tensor | None, message: str) -> None:
    model = build_gpt(config(), VOCAB, 1, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=message):
        model(tokens, positions, labels)


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 0"):
        GPTModel(config(), 0, device="meta")


def test_the_published_8_billion_model_on_8_ranks() -> None:
    """72 layers, h 3072, 24 heads: the pieces of all ranks are the whole, each rank has an eighth; without memory."""
    chosen = TransformerConfig(num_layers=72, hidden_size=3072, num_attention_heads=24, max_position_embeddings=1024)
    replicated, split = 0, 0
    for rank in range(8):
        model = GPTModel(chosen, 50257, group=mpu.GroupInfo(None, rank, 8), dtype=torch.float16, device="meta")
        assert model.embedding.word_embeddings.weight.shape == (6400, 3072)
        assert sum(parameter.numel() for parameter in model.parameters()) < 8.4e9 / 8
        parameters = dict(model.named_parameters())
        for name, sharding in mpu.parameter_shardings(model).items():
            size = sum(math.prod(piece.shape) for piece in sharding.pieces(tuple(parameters[name].shape)))
            if sharding.split_dim is not None:
                split += size
            elif rank == 0:
                replicated += size
    assert split + replicated == gpt_parameters(72, 3072, 50257, 1024)
