"""Which layouts a run can have: what is refused, in one sentence, and the nearest that would do."""

import dataclasses

import pytest

from megatron.base.complaints import ConfigError
from megatron.data.batch_sizes import BatchSchedule, RampUp
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from megatron.training.fitting import ramp_up_problems
from tests.harness.runs import flags

P, EACH = "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"


def read(ranks: int, **changes: object) -> RunConfig:
    return parse_composed(RunConfig, flags("data", **changes), world_size=ranks, check_inputs=False)


def test_what_fits() -> None:
    config = read(8, num_layers=8, tensor_model_parallel_size=2, **{P: 2, EACH: 2})
    assert config.data_parallel_size(8) == 2
    assert config.layer_split().virtual_size == 2
    assert [list(stage.layers) for stage in config.stages_of(1, 100)] == [[2, 3], [6, 7]]
    assert dataclasses.astuple(config.batch_sizes(8)) == (8, 2, 2)


def test_balanced_stages_depend_on_the_vocabulary() -> None:
    config = read(2, num_layers=8, account_for_loss_in_pipeline_split=True, **{P: 2})
    assert [len(stage.layers) for vocabulary in (10, 10_000) for stage in config.stages_of(1, vocabulary)] == [4, 1]


@pytest.mark.parametrize(
    ("ranks", "changes", "sentence"),
    [
        (
            6,
            {"tensor_model_parallel_size": 4},
            "--tensor-model-parallel-size 4: it must divide the number of ranks, which is 6; the nearest are 3 and 6",
        ),
        (
            8,
            {"num_layers": 6, "tensor_model_parallel_size": 2, P: 3},
            "--pipeline-model-parallel-size 3: times --tensor-model-parallel-size 2 it must divide the number of "
            "ranks, which is 8; the nearest are 2 and 4",
        ),
        (
            2,
            {"num_layers": 4, P: 4},
            "--pipeline-model-parallel-size 4: times --tensor-model-parallel-size 1 it must divide the number of "
            "ranks, which is 2; the nearest is 2; torchrun --nproc-per-node starts more",
        ),
        (
            4,
            {"num_layers": 3, P: 4},
            "--pipeline-model-parallel-size 4: each rank needs a layer, and --num-layers is 3; the nearest is 3",
        ),
        (
            2,
            {"num_layers": 5, P: 2},
            "--num-layers 5: it must be a multiple of --pipeline-model-parallel-size 2; the nearest are 4 and 6, or "
            "--pipeline-model-parallel-size 1 or 5",
        ),
        (
            2,
            {"num_layers": 8, P: 2, EACH: 3},
            "--num-layers-per-virtual-pipeline-stage 3: it must divide the 4 layers of a pipeline rank; the nearest "
            "are 2 and 4",
        ),
        (
            2,
            {"global_batch_size": 7},
            "--global-batch-size 7: it must be a multiple of --micro-batch-size 2 times the data-parallel size 2; the "
            "nearest are 4 and 8",
        ),
        (
            2,
            {"num_layers": 4, P: 2, EACH: 1, "global_batch_size": 10},
            "--global-batch-size 10: it makes 5 micro-batches, and with virtual stages their number must be a multiple "
            "of --pipeline-model-parallel-size 2; the nearest are 8 and 12",
        ),
        (
            2,
            {"num_layers": 4, P: 2, EACH: 1, "global_batch_size": 9},
            "--global-batch-size 9: it must be a multiple of --micro-batch-size 2 times the data-parallel size 1 times "
            "--pipeline-model-parallel-size 2, for the virtual stages; the nearest are 8 and 12",
        ),
        (2, {P: 2, "recompute_granularity": "full", "recompute_num_layers": 2}, "--recompute-num-layers 2: it must be"),
        (2, {P: 2, "pipeline_schedule": "zigzag"}, "--pipeline-schedule zigzag: accepted are 1f1b, gpipe"),
        (1, {"timing_log_level": 2}, "--timing-log-level 2: accepted are 0, 1"),
    ],
)
def test_what_does_not_fit(ranks: int, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(ranks, **changes)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(sentence)


def test_a_ramp_up_must_fit_virtual_stages_at_every_step() -> None:
    line = [*flags("data", num_layers=4, **{P: 2, EACH: 1}), "--rampup-batch-size", "2", "2", "40"]
    with pytest.raises(ConfigError) as caught:
        parse_composed(RunConfig, line, world_size=2, check_inputs=False)
    assert caught.value.problems == [
        "--rampup-batch-size 2 2 40: start and increment must be multiples of the micro batch times the data-parallel "
        "size times --pipeline-model-parallel-size 2, for the virtual stages, which is 4; the nearest "
        "that lead to 8 samples are 4 and 4"
    ]


@pytest.mark.parametrize(
    ("asked", "total", "group", "told"),
    [((16, 12, 99), 64, 8, "16 and 8"), ((6, 6, 99), 24, 4, "8 and 4"), ((30, 2, 99), 32, 8, "32 and 8")],
)
def test_the_nearest_ramp_up_is_legal_itself(asked: tuple[int, int, int], total: int, group: int, told: str) -> None:
    sentence = ramp_up_problems(BatchSchedule(total, RampUp(*asked)), 1, 1, group)[0]
    assert sentence.endswith(f"; the nearest that lead to {total} samples are {told}")
    start, increment = map(int, told.split(" and "))
    assert ramp_up_problems(BatchSchedule(total, RampUp(start, increment, 99)), 1, 1, group) == []
