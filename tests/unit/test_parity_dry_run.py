"""The 1T layout of arXiv:2104.04473 (128 layers, h 25,600, tensor 8, pipeline 64, data 6), planned on one machine."""

import resource
import runpy

import pytest

from megatron.base.formulas import gpt_parameters, layer_parameters, padded_vocab_size
from megatron.parity.dry_run import activation_bytes_of_rank, parameter_bytes, plan, plan_rank
from megatron.pipeline import Action, peak_in_flight
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from tests.harness.launch import REPOSITORY

VOCAB_SIZE, RANKS, P, M = 50_257, 3072, 64, 512
FLAGS = [
    *("--num-layers", "128", "--hidden-size", "25600", "--num-attention-heads", "160"),
    *("--seq-length", "2048", "--max-position-embeddings", "2048"),
    *("--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "64"),
    *("--micro-batch-size", "1", "--global-batch-size", "3072", "--train-iters", "1000", "--lr", "1e-4"),
    *("--bf16", "--use-distributed-optimizer", "--sequence-parallel"),
    *("--vocab-file", "none", "--merge-file", "none"),
]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return parse_composed(RunConfig, FLAGS, world_size=RANKS, check_inputs=False)


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (1500, 31), (3071, 63)])
def test_the_part_of_a_rank(config: RunConfig, rank: int, stage: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = plan_rank(config, RANKS, rank, VOCAB_SIZE)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: it fits any machine
    assert [(s.rank, s.layers) for s in plan.stages] == [(stage, range(2 * stage, 2 * stage + 2))]
    assert {parameter.device.type for parameter in plan.model.parameters()} == {"meta"}
    h, padded = 25_600, padded_vocab_size(VOCAB_SIZE, 128, 8)
    # What is not cut over the tensor ranks: norms and the biases of the row-parallel matrices.
    expected = 2 * ((layer_parameters(h) - 6 * h) // 8 + 6 * h)
    expected += padded // 8 * h if stage in (0, P - 1) else 0
    expected += 2048 * h if stage == 0 else 2 * h if stage == P - 1 else 0
    assert sum(parameter.numel() for parameter in plan.model.parameters()) == expected
    actions = [i for i in plan.program if isinstance(i, Action)]
    assert actions == list(plan.schedule.actions[stage]) and len(actions) == 2 * M
    sent = [m for i in plan.program if not isinstance(i, Action) for m in i.sends]
    assert len(sent) == M * ((stage < P - 1) + (stage > 0))
    assert {m.destination for m in sent} == {stage - 1, stage + 1} & set(range(P))


def test_it_is_the_published_model(config: RunConfig) -> None:
    assert f"{gpt_parameters(128, 25_600, 51_200, 2048) / 1e12:.3f}" == "1.008"
    assert config.data_parallel_size(RANKS) == 6
    assert parameter_bytes(config, RANKS) == 6 + 12 / 6


def test_the_tool_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(REPOSITORY / "tools/check_layout.py"))["main"]
    assert main(["--dry-run", "--world-size", str(RANKS), "--rank", "1500", *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 1500 of 3072: tensor rank 4 of 8, pipeline rank 31 of 64, data rank 1 of 6"
    assert lines[1] == "  holds layers 62 to 63"
    in_flight = peak_in_flight("1f1b", P, 1, M, 31)
    assert lines[3].startswith(f"  at most {in_flight} forward passes wait")
    assert f"take {34 * 2048 * 25_600 / 8 * 2 * in_flight / 1e9:.1f} GB" in lines[3]
    assert lines[-1] == "pipeline of 512 micro-batches: the bubble is (p - 1)/(v m) = 12.30% of the ideal time"
    assert main(["--dry-run", "--world-size", str(RANKS), "--rank", "3072", *FLAGS]) == 2
    assert capsys.readouterr().err == "error: --rank 3072: it must be below the number of ranks, which is 3072\n"
    assert lines[5] == "  from stage to stage goes a tensor of shape [256, 1, 25600] on this rank, 13.1 MB"


def small(*words: str) -> RunConfig:
    line = [*FLAGS, "--num-layers", "5", "--pipeline-model-parallel-size", "1", *words]
    return parse_composed(RunConfig, line, world_size=8, check_inputs=False)


@pytest.mark.parametrize(
    ("words", "inputs", "whole", "peak"),
    [
        ("", 0, 5, ""),
        ("--recompute-granularity full", 5, 0, ", and 1 whole layer more at the peak"),
        ("--recompute-granularity full --recompute-num-layers 2", 3, 0, ", and 2 whole layers more at the peak"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            2,
            3,
            ", and 1 whole layer more at the peak",
        ),
    ],
)
def test_only_what_is_recomputed_keeps_its_input_alone(words: str, inputs: int, whole: int, peak: str) -> None:
    """Of table 2 of arXiv:2205.05198, over 8 tensor ranks with sequence parallelism, without the s x s matrices."""
    config, tokens = small(*words.split()), 2048 * 25_600 / 8
    stages = config.stages_of(0, VOCAB_SIZE)
    assert activation_bytes_of_rank(config, stages, 3) == 3 * tokens * (2 * inputs + 34 * whole)
    lines = plan(config, 8, 0)
    assert lines[3].endswith(" GB" + peak)
    assert "at most 1 forward pass waits for the backward pass" in lines[3]
    assert not any("stage to stage" in line for line in lines)
