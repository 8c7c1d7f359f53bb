"""The example of generation: its real flags, and TOY=1 runs the same command on CPU ranks."""

import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.base.compose import compose
from megatron.training.arguments import read_flags
from tests.harness.launch import REPOSITORY, environment, run_command

SCRIPT = ["bash", "examples/generate.sh"]
_VARIABLES = ("LOAD", "PROMPTS", "SAMPLES", "OUTPUT", "TENSOR_PARALLEL")


def request(*flags: str, **variables: str) -> Any:
    """What the command that a dry run has printed asks for."""
    bare = {name: value for name, value in environment().items() if name not in _VARIABLES}
    done = run_command([*SCRIPT, *flags], env=bare | {"DRY_RUN": "1", "LOAD": "/data/8.3B"} | variables)
    assert (done.returncode, done.stderr) == (0, "")
    words = shlex.split(done.stdout)
    tool = REPOSITORY / "tools" / "generate_text.py"
    kind = runpy.run_path(str(tool))["Request"]
    values, problems = read_flags(kind, words[words.index(str(tool)) + 1 :])
    return compose(kind, values, int(words[words.index("--nproc-per-node") + 1]), problems)


def test_its_flags_are_those_of_megatron_lm_s_samples() -> None:
    asked = request("--seed", "7", SAMPLES="samples.jsonl", TENSOR_PARALLEL="8")
    assert (asked.trained.load, asked.trained.fp16, asked.distributed.tensor_model_parallel_size) == (
        "/data/8.3B",
        True,
        8,
    )
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (1.0, 0.9, 0)
    generate = asked.generate
    assert (generate.out_seq_length, generate.micro_batch_size, generate.seed) == (1024, 8, 7)
    assert (generate.genfile, generate.num_samples, generate.sample_input_file) == ("samples.jsonl", 8, None)
    asked = request(PROMPTS="prompts.jsonl").generate
    assert (asked.sample_input_file, asked.output, asked.num_samples) == ("prompts.jsonl", "prompts.jsonl.out", 0)
    asked = request().generate
    assert (asked.sample_input_file, asked.output, asked.prompt) == (None, None, None)


def test_what_is_not_set_is_told() -> None:
    bare = {name: value for name, value in environment().items() if name not in _VARIABLES}
    done = run_command(SCRIPT, env=bare)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("generate.sh: LOAD is not set: ")


@pytest.mark.slow
def test_it_runs_at_toy_size(tmp_path: Path) -> None:
    done = run_command(SCRIPT, env=environment(TOY="1", TOY_FOLDER=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in (tmp_path / "prompts.jsonl.out").read_text(encoding="utf-8").splitlines()]
    assert [one["prompt"] for one in written] == ["The License", "You may", "This"]
    assert all(0 < one["length"] <= 12 for one in written)
    assert {one["finish_reason"] for one in written} <= {"length", "stop"}
