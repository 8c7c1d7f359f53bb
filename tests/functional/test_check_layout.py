"""tools/check_layout.py: layouts that are right pass, one that is wrong is found, and the parameter named."""

import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.base.compose import compose
from megatron.parity.check import Checked
from megatron.parity.compare import TOLERANCES, Comparison, Outcome, compare, outcome_of
from megatron.parity.record import Record, record_run
from megatron.parity.report import table, verdict
from megatron.parity.shrink import degrees_of, flat, in_float64, one_process, shrunk
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from tests.functional.broken_layout import SCALED, broken
from tests.harness.launch import REPOSITORY, environment, run_command
from tests.harness.ranks import Ranks
from tests.harness.runs import write_documents
from tests.unit.test_parity_shrink import RUN

TIED = "embedding.word_embeddings.weight"


def small_run(folder: Path, words: str, ranks: int) -> RunConfig:
    """The shrunk run of RUN and `words`, in float64, on data of its own."""
    asked = parse_composed(RunConfig, [*RUN, *words.split()], world_size=ranks, check_inputs=False)
    config = in_float64(shrunk(asked, ranks, degrees_of(asked, ranks), 2), ranks)
    data = {"data_path": (write_documents(folder / "tokens"),), "data_cache_path": str(folder)}
    return compose(RunConfig, flat(config) | data, ranks)


def record(rank: int, world_size: int, config: RunConfig, how: str | None) -> Record:
    if how is None:
        return record_run(pretrain_gpt.train, config)
    with broken(how):
        return record_run(pretrain_gpt.train, config)


@pytest.fixture(scope="module")
def serial_runs() -> dict[bytes, Outcome]:
    """What one process gave, by its config: the layouts below are mostly those of one model."""
    return {}


def held_against_one_process(
    ranks: Ranks, serial_runs: dict[bytes, Outcome], config: RunConfig, world: int, how: str | None
) -> Comparison:
    alone = one_process(config)
    key = pickle.dumps({**flat(alone), "data_path": None, "data_cache_path": None})
    if key not in serial_runs:
        serial_runs[key] = outcome_of(ranks(1, record, alone, None))
    return compare(outcome_of(ranks(world, record, config, how)), serial_runs[key], TOLERANCES["float64"])


@pytest.mark.parametrize(
    ("how", "words", "world", "named"),
    [
        (None, "--tensor-model-parallel-size 2 --sequence-parallel", 2, {}),
        (None, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", 2, {}),
        ("partial", "--tensor-model-parallel-size 2 --sequence-parallel", 2, {"layernorm", "bias", "position"}),
        ("tied", "--pipeline-model-parallel-size 2 --use-distributed-optimizer", 2, {TIED}),
        ("scaled", "--use-distributed-optimizer --overlap-grad-reduce", 2, {SCALED}),
    ],
)
def test_what_is_wrong_is_found_and_named(
    ranks: Ranks,
    serial_runs: dict[bytes, Outcome],
    tmp_path: Path,
    how: str | None,
    words: str,
    world: int,
    named: set[str],
) -> None:
    comparison = held_against_one_process(ranks, serial_runs, small_run(tmp_path, words, world), world, how)
    wrong = [row.name for row in comparison.rows if row.gradient.relative > 1e-9 or row.gradient_copies > 1e-9]
    assert comparison.iteration == (1 if how else comparison.iteration)
    assert bool(comparison.faults()) == bool(wrong) == (how is not None)
    # Nothing but what is broken differs in the first iteration, and each kind of it does.
    assert all(any(part in name for part in named) for name in wrong)
    assert all(any(part in name for name in wrong) for part in named)
    text = "\n".join([*table(Checked("float64", comparison), False), *verdict([Checked("float64", comparison)])])
    assert ("NOT EQUAL" in text) == (how is not None)
    if how is not None:
        assert comparison.rows[0].name in wrong
        assert f"in float64, {comparison.rows[0].name}: its gradient differs" in text


def check(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return run_command([sys.executable, "tools/check_layout.py", *words], env=environment(**variables))


@pytest.mark.slow
def test_a_right_layout_is_equal_in_both_number_formats() -> None:
    words = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 --use-distributed-optimizer"
    done = check("--world-size", "32", "--max-ranks", "4", "--steps", "2", *RUN, *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked:   tensor 2 x pipeline 2 x data 1 = 4 ranks, 1 micro-batch an iteration; 2 it" in done.stdout
    assert "NOT checked, for want of ranks (--max-ranks): parallelism of the kind data" in done.stdout
    assert "--hidden-size 512 -> 32" in done.stdout
    assert "\nbfloat16:\n" in done.stdout and "\nfloat64:\n" in done.stdout
    assert "\nEQUAL: in bfloat16 losses within" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "scaled",
            ["NOT EQUAL: this layout does not train as one process does", f"in float64, {SCALED}: its gradient"],
        ),
        ("raising", ["NOT EQUAL: one process trains, this layout fails", "RuntimeError: the last stage is broken"]),
    ],
)
def test_a_broken_script_ends_with_1(how: str, said: list[str]) -> None:
    words = ["--pipeline-model-parallel-size", "2", "--script", "tests/functional/broken_layout.py", "--float64"]
    done = check(*words, "--steps", "1", *RUN, BROKEN=how)
    assert done.returncode == 1, done.stdout + done.stderr
    for sentence in said:
        assert sentence in done.stdout


def test_mistakes_are_told_together_and_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(REPOSITORY / "tools/check_layout.py"))["main"]
    assert main([*RUN, "--max-ranks", "1"]) == 2
    assert capsys.readouterr().err == "error: --max-ranks 1: it must be at least 2\n"
    assert main([*RUN, "--steps", "0", "--max-ranks", "1", "--pipeline-model-parallel-size", "3", "--timeout"]) == 2
    sentences = capsys.readouterr().err.splitlines()
    assert "error: --timeout: no value follows it; it must be a number" in sentences
    assert any(line.startswith("error: --num-layers 8: it must be a multiple of") for line in sentences)
    assert main([*RUN, "--steps", "0", "--max-ranks", "1", "--pipeline-model-parallel-size", "3"]) == 2
    sentences = capsys.readouterr().err.splitlines()
    assert sentences[:2] == ["error: --steps 0: it must be at least 1", "error: --max-ranks 1: it must be at least 2"]
    assert any(line.startswith("error: --num-layers 8: it must be a multiple of") for line in sentences)
    assert main([*RUN, "--pipeline-model-parallel-size", "3", "--script", "absent.py", "--stages", "4"]) == 2
    sentences = capsys.readouterr().err.splitlines()
    assert "error: --script absent.py: there is no such file" in sentences
    assert any(line.startswith("error: --stages is not known") for line in sentences)
    assert any(line.startswith("error: --num-layers 8: it must be a multiple of") for line in sentences)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--rank 2", "--rank 2: it needs --dry-run"),
        ("--dry-run --rank 5000", "--rank 5000: it must be below the number of ranks, which is 1"),
        ("--dry-run --script README.md", "--script README.md: --dry-run plans the model of pretrain_gpt.py"),
        ("--script README.md", "--script README.md: it cannot be read as Python ("),
        ("--script tools/inspect_dataset.py", "--script tools/inspect_dataset.py: it has no function train(config, ob"),
        (
            "--script pretrain_bert.py",
            "--script pretrain_bert.py: its train takes a BertRunConfig, and runs of",
        ),
    ],
)
def test_a_mistake_of_the_check_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, sentence: str
) -> None:
    monkeypatch.chdir(REPOSITORY)
    main = runpy.run_path(str(REPOSITORY / "tools/check_layout.py"))["main"]
    assert main([*RUN, *words.split()]) == 2
    told = capsys.readouterr().err.splitlines()
    assert any(line.startswith(f"error: {sentence}") for line in told)
    assert len(told) == 1
