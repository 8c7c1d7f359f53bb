"""The example of evaluation: its real flags are the paper's, and TOY=1 runs the same commands on CPU ranks."""

import re
import shlex
from pathlib import Path

import pytest

from megatron.base.compose import compose
from megatron.tasks.zero_shot import ZeroShotRequest
from megatron.training.arguments import read_flags
from tests.harness.launch import environment, run_command

SCRIPT = ["bash", "examples/evaluate_wikitext_lambada.sh"]
FILES = {"LOAD": "/data/8.3B", "WIKITEXT": "/data/wiki.test.tokens", "LAMBADA": "/data/lambada_test.jsonl"}


def requests(printed: str, ranks: int) -> list[ZeroShotRequest]:
    """What the commands that a dry run has printed ask for."""
    found = []
    for line in printed.splitlines():
        words = shlex.split(line)
        assert words[words.index("--nproc-per-node") + 1] == str(ranks)
        values, problems = read_flags(ZeroShotRequest, words[words.index("megatron.tasks.main") + 1 :])
        found.append(compose(ZeroShotRequest, values, ranks, problems))
    return found


def test_its_flags_are_those_of_the_paper() -> None:
    variables = {**FILES, "DRY_RUN": "1", "TENSOR_PARALLEL": "8", "GPUS_PER_NODE": "16"}
    done = run_command([*SCRIPT, "--batch-size", "4"], env=environment(**variables))
    assert (done.returncode, done.stderr) == (0, "")
    wikitext, lambada = requests(done.stdout, 16)
    for one, name in ((wikitext, "WIKITEXT"), (lambada, "LAMBADA")):
        assert one.evaluation.valid_data == (FILES[name],)
        assert (one.trained.load, one.trained.fp16, one.evaluation.seq_length) == (FILES["LOAD"], True, 1024)
        assert (one.distributed.tensor_model_parallel_size, one.evaluation.micro_batch_size) == (8, 4)
    assert (wikitext.evaluation.task, wikitext.evaluation.overlapping_eval) == ("WIKITEXT103", 32)
    assert (lambada.evaluation.task, lambada.evaluation.strict_lambada) == ("LAMBADA", True)


def test_all_that_is_not_set_is_told_at_once() -> None:
    bare = {name: value for name, value in environment().items() if name not in FILES}
    done = run_command(SCRIPT, env=bare)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.findall(r"^evaluate_wikitext_lambada.sh: (\w+) is not set: .+$", done.stderr, re.MULTILINE) == [*FILES]


@pytest.mark.slow
def test_it_runs_at_toy_size(tmp_path: Path) -> None:
    done = run_command(SCRIPT, env=environment(TOY="1", TOY_FOLDER=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    words = len((tmp_path / "toy.txt").read_text(encoding="utf-8").strip().split(" "))
    passages = len((tmp_path / "toy.jsonl").read_text(encoding="utf-8").splitlines())
    assert f"WIKITEXT103: {words} words, " in done.stdout
    told = re.search(r"right of (\d+) passages(?:, (\d+) not scored)?; strict", done.stdout)
    assert told is not None
    assert sum(int(number or 0) for number in told.groups()) == passages
