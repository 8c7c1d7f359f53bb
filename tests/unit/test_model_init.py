"""Initial weights: drawn by (seed, name, block) and by nothing else."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model import TransformerConfig, build_gpt, initialize_parameters
from megatron.model.gpt import GPTModel
from megatron.model.init import BLOCK_ROWS, block_seed, fill_parameter, normal
from megatron.mpu.sharding import Sharding

VOCAB = 2500
CONFIG = TransformerConfig(
    num_layers=3, hidden_size=32, num_attention_heads=4, max_position_embeddings=40, ffn_hidden_size=1500
)


def gpt(seed: int = 7, dtype: torch.dtype = torch.float32, config: TransformerConfig = CONFIG) -> dict[str, Tensor]:
    return {
        name: p.detach() for name, p in build_gpt(config, VOCAB, seed, dtype=dtype, device="cpu").named_parameters()
    }


def block(seed: int, name: str, number: int, rows: int, columns: int, std: float) -> Tensor:
    """A block by the rule, with a generator of its own."""
    generator = torch.Generator().manual_seed(block_seed(seed, name, number))
    return torch.empty(rows, columns).normal_(0.0, std, generator=generator)


def test_a_default_device_of_the_users_does_not_matter() -> None:
    with torch.device("meta"):  # where nothing can be drawn
        actual = gpt()
    expected = gpt()
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_the_seed_of_a_block_is_32_bits_of_sha256() -> None:
    seeds = {block_seed(seed, name, number) for seed in (1, 2, 11) for name in ("a", "b", "1") for number in range(20)}
    assert len(seeds) == 3 * 3 * 20
    assert min(seeds) >= 0 and 2**31 < max(seeds) < 2**32


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.word_embeddings.weight", 0.02),
        ("embedding.position_embeddings.weight", 0.02),
        ("transformer.layers.1.self_attention.query_key_value.weight", 0.02),
        ("transformer.layers.1.self_attention.dense.weight", 0.02 / math.sqrt(6)),
        ("transformer.layers.2.mlp.dense_h_to_4h.weight", 0.02),
        ("transformer.layers.2.mlp.dense_4h_to_h.weight", 0.02 / math.sqrt(6)),
    ],
)
def test_matrices_are_drawn_in_blocks_of_1024_rows(name: str, std: float) -> None:
    weight = gpt()[name]
    rows, columns = weight.shape
    if name.startswith("embedding.word"):
        rows = VOCAB
    for number, start in enumerate(range(0, rows, 1024)):
        size = min(1024, rows - start)
        assert torch.equal(weight[start : start + size], block(7, name, number, size, columns, std))
    assert torch.count_nonzero(weight[rows:]) == 0


def test_biases_are_zero_and_norms_are_one() -> None:
    for name, parameter in gpt().items():
        if name.endswith("bias"):
            assert torch.count_nonzero(parameter) == 0, name
        elif "layernorm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert torch.count_nonzero(parameter) > 0, name


def test_the_spread_is_the_one_asked_for() -> None:
    config = TransformerConfig(
        num_layers=8, hidden_size=128, num_attention_heads=4, max_position_embeddings=8, init_method_std=0.5
    )
    weights = gpt(config=config)
    # 65,536 draws: the standard deviation is known to 0.3 %.
    assert weights["transformer.layers.0.mlp.dense_h_to_4h.weight"].std().item() == pytest.approx(0.5, rel=0.02)
    assert weights["transformer.layers.7.mlp.dense_4h_to_h.weight"].std().item() == pytest.approx(0.125, rel=0.02)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, again, other = gpt(7), gpt(7), gpt(8)
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name]), name
        if parameter.dim() == 2:
            assert not torch.equal(parameter, other[name]), name


def test_no_two_layers_start_alike() -> None:
    weights = gpt()
    for matrix in ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"):
        first, second = (weights[f"transformer.layers.{layer}.{matrix}.weight"] for layer in (0, 1))
        assert not torch.equal(first, second), matrix


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_casts_of_the_same_draws(dtype: torch.dtype) -> None:
    for (name, parameter), single in zip(gpt(dtype=dtype).items(), gpt().values(), strict=True):
        assert parameter.dtype == dtype
        assert torch.equal(parameter, single.to(dtype)), name


def test_default_generators_stay_as_they_were() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    gpt()
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_do_not_depend_on_the_state_of_the_default_generator() -> None:
    torch.manual_seed(1)
    first = gpt()
    torch.manual_seed(2)
    assert all(torch.equal(parameter, first[name]) for name, parameter in gpt().items())


def test_shardings_and_attributes_survive() -> None:
    model = GPTModel(CONFIG, VOCAB, device="meta")
    before = mpu.parameter_shardings(model)
    initialize_parameters(model, 7, torch.float32, "cpu")
    assert mpu.parameter_shardings(model) == before
    parameters = dict(model.named_parameters())
    assert before.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert parameter.requires_grad and not parameter.is_meta, name
        assert parameter.tensor_model_parallel == (before[name].split_dim is not None), name  # type: ignore[attr-defined]
    qkv = parameters["transformer.layers.0.self_attention.query_key_value.weight"]
    assert (qkv.partition_dim, qkv.partition_stride) == (0, 1)  # type: ignore[attr-defined]


def test_a_column_split_part_is_a_slice_of_the_whole() -> None:
    name, std = "some.weight", 0.3
    whole = torch.cat([block(3, name, 0, 1024, 12, std), block(3, name, 1, 476, 12, std)])
    part = torch.empty(1500, 4)
    sharding = Sharding(name=name, global_shape=(1500, 12), split_dim=1, offset=8, partitions=3)
    fill_parameter(part, sharding, normal(std), 3)
    assert torch.equal(part, whole[:, 8:12])


@pytest.mark.parametrize("offset", [0, 1000, 1024, 1500, 2000, 3000])
def test_a_row_split_part_is_a_slice_of_the_whole(offset: int) -> None:
    name, std = "some.weight", 0.3
    whole = torch.zeros(3500, 12)
    whole[:2500] = torch.cat([block(3, name, n, min(1024, 2500 - 1024 * n), 12, std) for n in range(3)])
    part = torch.empty(500, 12)
    sharding = Sharding(name=name, global_shape=(2500, 12), split_dim=0, offset=offset, partitions=7)
    fill_parameter(part, sharding, normal(std), 3)
    assert torch.equal(part, whole[offset : offset + 500])


def test_a_rank_draws_only_the_blocks_it_holds_a_part_of() -> None:
    drawn: list[tuple[int, ...]] = []

    def fill(tensor: Tensor) -> None:
        drawn.append(tuple(tensor.shape))

    sharding = Sharding(name="x", global_shape=(10 * BLOCK_ROWS, 2), split_dim=0, offset=3 * BLOCK_ROWS, partitions=5)
    fill_parameter(torch.empty(2 * BLOCK_ROWS, 2), sharding, fill, 0)
    assert drawn == [(BLOCK_ROWS, 2)] * 2


def test_a_module_without_a_rule_is_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="Linear.weight has no initializer"):
        initialize_parameters(nn.Linear(2, 2, device="meta"), 0, torch.float32, "cpu")


def test_the_rule_is_pinned() -> None:
    """A seed keeps its weights from version to version. To 1e-6, since vector units round logarithms differently."""
    weights = gpt(1234)
    words = weights["embedding.word_embeddings.weight"][[0, 1023, 1024, 2499], 0]
    assert words.tolist() == pytest.approx([-0.00397127, -0.02075485, 0.00989772, -0.01119932], abs=1e-6)
    output = weights["transformer.layers.2.mlp.dense_4h_to_h.weight"][0, :2]
    assert output.tolist() == pytest.approx([-0.00998334, 0.00960451], abs=1e-6)
