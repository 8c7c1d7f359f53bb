"""What README.md tells a reader to type works: its commands run at toy size, its code is the file it names."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron.tasks.config import FinetuneConfig
from megatron.training.arguments import parse_composed
from megatron.training.bert import BertRunConfig
from megatron.training.config import RunConfig
from tests.harness.launch import run_command

TOY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr-warmup-iters 1 --save-interval 2 --log-interval 1 "
    "--eval-iters 1 --split 80,10,10 --num-workers 0"
)


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """The words of every command in the ```bash blocks of `text`."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def command(text: str, script: str) -> list[str]:
    return next(words for words in commands(text) if script in words)


def test_scripts_and_files_named_exist(readme: str, repository: Path) -> None:
    links = re.findall(r"\]\(([\w./]+)\)", readme)
    scripts = [word for words in commands(readme) for word in words if word.endswith((".sh", ".py"))]
    assert len(links) > 5
    assert len(scripts) > 3
    for name in [*links, *scripts]:
        assert (repository / name).exists(), name


def test_the_tree_names_every_tool(readme: str, repository: Path) -> None:
    (tree,) = re.findall(r"^tools/\n((?:  .*\n)+)", readme, re.MULTILINE)
    named = [line.split()[0] for line in tree.splitlines()]
    assert sorted(named) == sorted(path.name for path in (repository / "tools").iterdir() if path.is_file())


def test_code_is_the_example_file(readme: str, repository: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert code == [(repository / "examples" / "mpu_mlp.py").read_text(encoding="utf-8")]


def test_the_conversion_is_one_that_the_tool_takes(readme: str) -> None:
    """All that is wrong with it here is that its source is not there."""
    words = command(readme, "tools/convert_checkpoint.py")
    done = run_command(words)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: --load gpt2: there is no such folder"]


def test_flags_of_the_pretraining_command_are_right_for_its_ranks(readme: str) -> None:
    words = command(readme, "pretrain_gpt.py")
    ranks = int(words[words.index("--nproc-per-node") + 1])
    config = parse_composed(
        RunConfig, words[words.index("pretrain_gpt.py") + 1 :], world_size=ranks, check_inputs=False
    )
    assert config.data_parallel_size(ranks) == 2


def test_flags_of_the_bert_commands_are_right_for_their_ranks(readme: str) -> None:
    for program, kind in {"pretrain_bert.py": BertRunConfig, "megatron.tasks.main": FinetuneConfig}.items():
        words = command(readme, program)
        ranks = int(words[words.index("--nproc-per-node") + 1])
        config = parse_composed(kind, words[words.index(program) + 1 :], world_size=ranks, check_inputs=False)
        assert config.data_parallel_size(ranks) == 4
        assert config.model.num_layers == 24


def test_pretraining_commands_run_at_toy_size(readme: str, tmp_path: Path, repository: Path) -> None:
    """Tokenizer, tokens, training, a second start that resumes, text: in a folder of its own."""
    texts = [f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * 5 for i in range(60)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def run(line: str) -> str:
        inside = line.replace("python ", f"python {repository}/").replace(
            " pretrain_gpt.py", f" {repository}/pretrain_gpt.py"
        )
        done = run_command(["bash", "-c", f"cd {tmp_path} && {inside}"])
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(shlex.join(command(readme, "tools/train_tokenizer.py")).replace("32000", "300"))
    run(shlex.join(command(readme, "tools/preprocess_data.py")).replace("--workers 8", "--workers 1"))
    words = shlex.join(command(readme, "pretrain_gpt.py"))
    words = words.replace("--nproc-per-node 8", "--standalone --nproc-per-node 2").replace("-size 4 ", "-size 2 ", 1)
    first = run(f"{words} {TOY} --exit-interval 2")
    assert "iteration 2 " in first
    second = run(f"{words} {TOY}")
    assert "loaded iteration 2 of checkpoints" in second
    assert "iteration 4 " in second
    text = run("python tools/generate_text.py --load checkpoints --prompt 'the quick' --out-seq-length 5")
    assert text.startswith("the quick")
