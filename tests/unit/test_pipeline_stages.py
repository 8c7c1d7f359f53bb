"""Stage split: every layer once and in order, uneven and balanced counts, complaints that name the nearest values."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.complaints import ConfigError
from megatron.base.config import Config
from megatron.base.formulas import layer_forward_flops, model_flops
from megatron.pipeline import LayerSplit, PipelineConfig, head_cost


def counts(split: LayerSplit) -> list[int]:
    return [len(stage.layers) for stage in split.stages()]


def is_legal(l: int, p: int, each: int | None, first: int | None, last: int | None) -> bool:
    """The rules of an even split, read off a list of all ranks' layers."""
    given_numbers = [n for n in (first, last) if n is not None]
    shared, ranks = l - sum(given_numbers), p - len(given_numbers)
    if (
        ranks < 0
        or (ranks == 0 and shared)
        or (ranks and (shared < ranks or shared % ranks))
        or (given_numbers and p < 2)
    ):
        return False
    layers = given_numbers + [shared // ranks] * ranks if ranks else given_numbers
    if each is None:
        return True
    typical = layers[-1] if ranks else layers[0]
    chunks = typical // each
    return typical % each == 0 and all(n % chunks == 0 for n in layers) and not (p == 1 and chunks > 1)


SMALL = st.integers(1, 6)
ANY_SPLIT = st.builds(
    LayerSplit,
    st.integers(1, 24),
    SMALL,
    st.none() | SMALL,
    st.none() | SMALL,
    st.none() | SMALL,
)


@given(ANY_SPLIT)
def test_every_layer_stands_once_in_the_order_of_the_model(split: LayerSplit) -> None:
    l, p, each, first, last, *_ = dataclasses.astuple(split)
    if not is_legal(l, p, each, first, last):
        assert len(split.problems()) == 1
        with pytest.raises(ConfigError):
            split.stages()
        return
    stages = split.stages()
    v = split.virtual_size
    assert [layer for stage in stages for layer in stage.layers] == list(range(l))
    assert [(stage.chunk, stage.rank) for stage in stages] == list(itertools.product(range(v), range(p)))
    assert [stage.embedding for stage in stages] == [True] + [False] * (p * v - 1)
    assert [stage.head for stage in stages] == [False] * (p * v - 1) + [True]
    by_rank = [sum(len(stage.layers) for stage in stages if stage.rank == rank) for rank in range(p)]
    assert by_rank[0] == first or first is None
    assert by_rank[-1] == last or last is None
    assert len(set(by_rank[first is not None : p - (last is not None)])) <= 1


@given(ANY_SPLIT)
def test_the_values_that_a_complaint_names_are_legal_and_the_nearest(split: LayerSplit) -> None:
    for problem in split.problems():
        flag, value = re.match(r"--([a-z-]+) (\d+): ", problem).groups()  # type: ignore[union-attr]
        field = flag.replace("-", "_")
        assert getattr(split, field) == int(value)
        named = re.search(r"; the nearest (?:are|is) (\d+)(?: and (\d+))?", problem)
        suggested = {int(n) for n in (named.groups() if named else ()) if n is not None}
        tried = {n for n in range(1, 100) if not dataclasses.replace(split, **{field: n}).problems()}
        assert suggested <= tried
        closest = min((abs(n - int(value)) for n in tried), default=None)
        assert closest == min((abs(n - int(value)) for n in suggested), default=None)


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        (
            LayerSplit(10, 4),
            "--num-layers 10: it must be a multiple of --pipeline-model-parallel-size 4; the nearest are 8 and 12, "
            "or --pipeline-model-parallel-size 2 or 5",
        ),
        (
            LayerSplit(12, 16),
            "--pipeline-model-parallel-size 16: each rank needs a layer, and --num-layers is 12; the nearest is 12",
        ),
        (
            LayerSplit(24, 4, 4),
            "--num-layers-per-virtual-pipeline-stage 4: it must divide the 6 layers of a pipeline rank; "
            "the nearest are 3 and 6",
        ),
        (
            LayerSplit(24, 1, 12),
            "--num-layers-per-virtual-pipeline-stage 12: virtual stages need --pipeline-model-parallel-size of at "
            "least 2; the nearest is 24",
        ),
        (
            LayerSplit(24, 4, None, 5),
            "--decoder-first-pipeline-num-layers 5: the 3 ranks that share what it leaves of --num-layers 24 must get "
            "equally many; the nearest are 3 and 6",
        ),
        (
            LayerSplit(24, 2, None, 5, 6),
            "--decoder-first-pipeline-num-layers 5: with --decoder-last-pipeline-num-layers 6 it must make the 24 of "
            "--num-layers; the nearest is 18, or --decoder-last-pipeline-num-layers 19",
        ),
        (
            LayerSplit(24, 4, 2, 6, None, head_cost=1.0),
            "--decoder-first-pipeline-num-layers 6: it cannot be given where the layers are balanced by their cost",
        ),
        (
            LayerSplit(10, 4, 1, head_cost=1.0),
            "--num-layers-per-virtual-pipeline-stage 1: it makes 12 stages of --num-layers 10; the nearest is 2",
        ),
    ],
)
def test_complaints(split: LayerSplit, sentence: str) -> None:
    assert split.problems() == [sentence]


def test_uneven_ranks_keep_their_numbers_over_all_their_chunks() -> None:
    assert counts(LayerSplit(24, 4, None, 3, 5)) == [3, 8, 8, 5]
    assert counts(LayerSplit(22, 4, 4, 2, 4)) == [1, 4, 4, 2] * 2


COSTS = st.sampled_from([0.0, 0.25, 1.0, 2.5, 7.0])


@given(st.integers(1, 9), st.integers(1, 4), COSTS, COSTS)
def test_balanced_stages_have_the_least_possible_longest_time(l: int, p: int, embedding: float, head: float) -> None:
    split = LayerSplit(l, p, embedding_cost=embedding, head_cost=head)
    if p > l or (l % p and not embedding + head):
        assert split.problems() != []
        return

    def longest(layers: tuple[int, ...]) -> float:
        return max(n + (embedding if i == 0 else 0) + (head if i == p - 1 else 0) for i, n in enumerate(layers))

    every_split = (c for c in itertools.product(range(1, l + 1), repeat=p) if sum(c) == l)
    assert longest(tuple(counts(split))) == min(map(longest, every_split))


def test_a_balanced_split_of_the_two_ends_counted_as_a_layer_each() -> None:
    config = PipelineConfig(
        pipeline_model_parallel_size=4,
        num_layers_per_virtual_pipeline_stage=4,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert counts(config.split(30)) == [3, 4, 4, 4, 4, 4, 4, 3]


def test_costs_count_only_where_the_flags_ask_for_it() -> None:
    plain = PipelineConfig(pipeline_model_parallel_size=4).split(24, embedding_cost=2.0, head_cost=5.0)
    assert counts(plain) == [6, 6, 6, 6]
    loss = PipelineConfig(pipeline_model_parallel_size=4, account_for_loss_in_pipeline_split=True)
    assert counts(loss.split(24, head_cost=2.5)) == [6, 7, 7, 4]


def test_the_cost_of_the_head_is_its_share_of_the_model_s_operations() -> None:
    s, h, V, l = 1024, 1920, 51_200, 24
    with_head, layer = model_flops(1, s, l, h, V), layer_forward_flops(s, h)
    assert with_head == pytest.approx(3 * layer * (l + head_cost(s, h, V)))


def test_a_config_complains_of_everything_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig(0, decoder_last_pipeline_num_layers=-1, pipeline_schedule="zigzag")
    assert len(caught.value.problems) == 3
    assert isinstance(PipelineConfig(), Config)
    assert PipelineConfig().scatter_gather_tensors_in_pipeline


def test_global_batches_that_virtual_stages_cannot_take_are_refused() -> None:
    config = PipelineConfig(4)
    assert config.batch_problems(2, 64, 8) == []
    assert config.batch_problems(1, 48, 8) == []
    assert config.batch_problems(2, 48, 8) == [
        "--global-batch-size 48: it makes 6 micro-batches, and with virtual stages their number must be a multiple of "
        "--pipeline-model-parallel-size 4; the nearest are 32 and 64"
    ]
