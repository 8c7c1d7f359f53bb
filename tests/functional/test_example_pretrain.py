"""The pretraining examples: their real flags are the published run's, and TOY=1 runs the same commands on CPU ranks."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.base.activations import activation_bytes
from megatron.base.formulas import gpt_parameters, hardware_flops, model_flops, padded_vocab_size
from megatron.parity.dry_run import activation_bytes_of_rank, parameter_bytes, plan_rank
from megatron.parity.shrink import Degrees, degrees_of
from megatron.pipeline import bubble, peak_in_flight
from megatron.training.arguments import parse_composed
from megatron.training.config import RunConfig
from tests.harness.examples import DATA, dry_run, rounded, start
from tests.harness.launch import REPOSITORY, environment, free_port, run_command

BERT = "examples/pretrain_bert_3.9B.sh"
BIG, SMALL, HUGE = (f"examples/pretrain_gpt_{size}.sh" for size in ("8.3B", "345M", "175B"))
GPT2_ENTRIES = 50_257


def config_of(words: list[str], ranks: int) -> RunConfig:
    flags = words[words.index(str(REPOSITORY / "pretrain_gpt.py")) + 1 :]
    return parse_composed(RunConfig, flags, world_size=ranks, check_inputs=False)


def parameters_of(config: RunConfig) -> int:
    model, t = config.model, config.distributed.tensor_model_parallel_size
    padded = padded_vocab_size(GPT2_ENTRIES, model.make_vocab_size_divisible_by, t)
    return gpt_parameters(model.num_layers, model.hidden_size, padded, model.max_position_embeddings)


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["split"] == "train"]


def test_the_big_example_is_the_published_run_on_32_nodes_of_16() -> None:
    words = dry_run(BIG, MASTER_ADDR="node0", NODE_RANK="3")
    launcher = words[: words.index(str(REPOSITORY / "pretrain_gpt.py"))]
    assert launcher == shlex.split(
        "torchrun --nproc-per-node 16 --nnodes 32 --node-rank 3 --master-addr node0 --master-port 29500"
    )
    config = config_of(words, 512)
    assert f"{parameters_of(config) / 1e9:.1f}" == "8.3"
    assert config.data_parallel_size(512) == 64
    batch = config.batch_sizes(512)
    assert (batch.global_batch_size, batch.micro_batch_size, batch.num_micro_batches) == (512, 8, 1)
    model, schedule, optimizer = config.model, config.schedule, config.optimizer
    assert (model.num_attention_heads, model.attention_dropout, model.hidden_dropout) == (24, 0.1, 0.1)
    assert (config.training.train_iters, config.data.seq_length) == (300_000, 1024)
    assert (schedule.lr, schedule.min_lr, schedule.lr_warmup_iters) == (1.5e-4, 1e-5, 3000)
    assert (schedule.lr_decay_style, schedule.lr_decay_iters) == ("cosine", 300_000)
    assert (optimizer.weight_decay, optimizer.clip_grad, optimizer.use_distributed_optimizer) == (0.01, 1.0, True)
    assert (config.precision.fp16, config.recompute.recompute_granularity) == (True, "full")


def test_the_huge_example_is_gpt3_on_128_nodes_of_8() -> None:
    words = dry_run(HUGE, MASTER_ADDR="node0", NODE_RANK="127", DATA_PATH="0.6 /data/a 0.4 /data/b")
    launcher = words[: words.index(str(REPOSITORY / "pretrain_gpt.py"))]
    assert launcher == shlex.split(
        "torchrun --nproc-per-node 8 --nnodes 128 --node-rank 127 --master-addr node0 --master-port 29500"
    )
    config = config_of(words, 1024)
    assert f"{parameters_of(config) / 1e9:.0f}" == "175"
    assert degrees_of(config, 1024) == Degrees(tensor=8, pipeline=16, data=8, virtual=3)
    assert (config.distributed.sequence_parallel, config.recompute.granularity, config.precision.bf16) == (
        True,
        None,
        True,
    )
    batch, schedule, optimizer = config.batch_sizes(1024), config.schedule, config.optimizer
    assert (batch.global_batch_size, batch.micro_batch_size, batch.num_micro_batches) == (1536, 1, 192)
    tokens = {
        300e9: config.training.train_samples,
        260e9: schedule.lr_decay_samples,
        375e6: schedule.lr_warmup_samples,
        12e9: config.training.rampup_batch_size[2] if config.training.rampup_batch_size else None,
    }
    assert all(samples is not None and abs(samples * 2048 - asked) <= 2048 for asked, samples in tokens.items())
    assert [config.batch_schedule(1024).size(samples) for samples in (0, 10**6, 5_859_375)] == [128, 256, 1536]
    assert (schedule.lr, schedule.min_lr, schedule.lr_decay_style) == (6e-5, 6e-6, "cosine")
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay, optimizer.clip_grad) == (
        0.9,
        0.95,
        0.1,
        1,
    )


def test_what_the_huge_example_tells_is_what_the_formulas_give() -> None:
    config = config_of(dry_run(HUGE, MASTER_ADDR="node0", NODE_RANK="0"), 1024)
    first = plan_rank(config, 1024, 0, GPT2_ENTRIES)
    parameters = sum(parameter.numel() for parameter in first.model.parameters())
    s, h, n, t, p, v = 2048, 12_288, 96, 8, 16, 3
    in_flight = [peak_in_flight("1f1b", p, v, 192, rank) for rank in (0, p - 1)]
    layers = 2 * in_flight[0]
    sample = model_flops(1, s, 96, h, 51_200)
    told = {
        "1.46e9 parameters": parameters / 1e9,
        "11.0 GB": parameters * parameter_bytes(config, 1024) / 1e9,
        "13.5 GB": activation_bytes_of_rank(config, first.stages, in_flight[0]) / 1e9,
        "72.9 GB": layers * activation_bytes(s, 1, h, n, t=t) / 1e9,
        "126 layers in flight": layers,
        "63 passes": in_flight[0],
        "33 and the logits": in_flight[1],
        "1.31 times": layers / 96,
        "2.6 %": bubble(p, v, 192) * 100,
        "7.8 %": bubble(p, 1, 192) * 100,
        "31 % and": bubble(p, v, 16) * 100,
        "94 % at": bubble(p, 1, 16) * 100,
        "50 MB": 2 * s * h / 1e6,
        "6.3 MB": 2 * s * h / t / 1e6,
        "3.2e23": sample * 146_484_375 / 1e23,
        "26 days": sample * 146_484_375 / (1024 * 0.45 * 312e12) / 86_400,
        "2.4 TB": parameters_of(config) * 14 / 1e12,
        "2 hours": 300 * 1536 * sample / (1024 * 0.45 * 312e12) / 3600,
    }
    text = (REPOSITORY / HUGE).read_text().replace("\n#       ", " ")
    for words, value in told.items():
        digits = re.split(r"e\d| ", words)[0]
        assert rounded(value, digits) == digits, words
        assert words in text, words


def test_memory_that_the_examples_tell_is_what_the_formulas_give() -> None:
    config = config_of(dry_run(BIG, MASTER_ADDR="node0", NODE_RANK="0"), 512)
    h, l, n, s, b, t, V = 3072, 72, 24, 1024, 8, 8, 51_200
    split = l * (12 * h * h + 7 * h) + V * h  # matrices, the biases of those cut by columns, the embedding
    rank = split // t + l * 6 * h + s * h + 2 * h
    big = {
        "1.04e9 parameters": rank / 1e9,
        "4.4 GB": rank * (4 + 12 / 64) / 1e9,
        "16.7 GB": rank * 16 / 1e9,
        "3.6 GB": l * activation_bytes(s, b, h, n, t=t, recompute="full") / 1e9,
        "0.5 GB instead": l * activation_bytes(s, b, h, n, t=t, recompute="full") / t / 1e9,
        "0.5 GB at most": activation_bytes(s, b, h, n, t=t) / 1e9,
        "23.6 GB": l * activation_bytes(s, b, h, n, t=t, fused_attention=True) / 1e9,
        "32.6 GB": l * activation_bytes(s, b, h, n, t=t) / 1e9,
        "116 GB": parameters_of(config) * 14 / 1e9,
        "2.42 s": hardware_flops(512, s, l, h, V, recompute_granularity="full") / 15.1e15,
    }
    parameters = parameters_of(config_of(dry_run(SMALL, PRECISION="bf16"), 1))
    small = {
        "355e6 parameters": parameters / 1e6,
        "6.4 or": parameters * 18 / 1e9,
        "5.7 GB": parameters * 16 / 1e9,
        "3.4 GB": 24 * activation_bytes(s, 4, 1024, 16, fused_attention=True) / 1e9,
        "0.2 GB": 24 * activation_bytes(s, 4, 1024, 16, recompute="full") / 1e9,
        "1.6e19": model_flops(64, s, 24, 1024, 50_304) * 100_000 / 1e19,
    }
    for script, told in ((BIG, big), (SMALL, small)):
        text = (REPOSITORY / script).read_text()
        for words, value in told.items():
            digits = re.split(r"e\d| ", words)[0]
            assert rounded(value, digits) == digits
            assert words in text


def test_rendezvous_by_c10d_needs_no_node_rank() -> None:
    words = dry_run(BIG, RENDEZVOUS="c10d", MASTER_ADDR="node0", MASTER_PORT="1234", RUN_ID="second", MAX_RESTARTS="3")
    assert "--node-rank" not in words
    expected = "--rdzv-backend c10d --rdzv-endpoint node0:1234 --rdzv-id second --max-restarts 3"
    assert expected in shlex.join(words)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_small_example_is_gpt2_medium_on_one_rank(precision: str) -> None:
    words = dry_run(SMALL, PRECISION=precision, DATA_PATH="0.7 /data/a 0.3 /data/b")
    config = config_of(words, 1)
    assert f"{parameters_of(config) / 1e6:.0f}" == "355"
    assert config.data.data_path == ("0.7", "/data/a", "0.3", "/data/b")
    assert (config.precision.fp16, config.precision.bf16) == (precision == "fp16", precision == "bf16")
    assert config.batch_sizes(1).num_micro_batches == 16


@pytest.mark.parametrize("script", [BIG, HUGE, SMALL])
def test_a_dry_run_needs_nothing_set(script: str) -> None:
    done = start(script, DRY_RUN="1", PRECISION="bf16", PATH="/usr/bin:/bin")
    assert (done.returncode, done.stderr) == (0, "")
    words = shlex.split(done.stdout)
    for flag, name in {"--data-path": "DATA_PATH", "--vocab-file": "VOCAB_FILE", "--save": "SAVE"}.items():
        assert words[words.index(flag) + 1] == name
    variables = words[: words.index("torchrun")]
    assert "OMP_NUM_THREADS=1" in variables
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in variables) == (script != SMALL)
    if script != SMALL:
        assert "--node-rank NODE_RANK --master-addr MASTER_ADDR" in done.stdout


def test_further_flags_win() -> None:
    assert config_of(dry_run(SMALL, "--train-iters", "300000", PRECISION="bf16"), 1).training.train_iters == 300_000


@pytest.mark.parametrize(
    ("script", "also"), [(BIG, ["MASTER_ADDR", "NODE_RANK"]), (HUGE, ["MASTER_ADDR", "NODE_RANK"]), (SMALL, [])]
)
def test_all_that_is_not_set_is_told_at_once(script: str, also: list[str]) -> None:
    done = start(script)
    assert done.returncode == 2
    told = re.findall(r"^pretrain_gpt_\S+\.sh: (\w+) is not set: .+$", done.stderr, re.MULTILINE)
    assert sorted(told) == sorted([*DATA, "SAVE", *also])
    assert done.stdout == ""


def test_other_ways_to_meet_and_absent_programs_are_refused(tmp_path: Path) -> None:
    done = start(BIG, RENDEZVOUS="etcd")
    assert (done.returncode, done.stderr) == (
        2,
        "pretrain_gpt_8.3B.sh: RENDEZVOUS=etcd: it must be static or c10d\n",
    )
    for name in ("bash", "dirname", "basename"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = start(SMALL, PATH=str(tmp_path), **DATA, SAVE="/data/run")
    assert done.returncode == 2
    assert "torchrun is not on PATH" in done.stderr


@pytest.fixture(scope="module")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a toy run makes for itself, made once: tokenizer and token set."""
    folder = tmp_path_factory.mktemp("toy")
    making = f"source examples/pretraining.sh && TOY_FOLDER={folder} && make_toy_data ."
    done = run_command(["bash", "-euc", making])
    assert done.returncode == 0, done.stderr
    return folder


def test_a_dry_run_at_toy_size_makes_no_folder(tmp_path: Path) -> None:
    done = start(SMALL, TOY="1", DRY_RUN="1", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/" in done.stdout
    assert list(tmp_path.iterdir()) == []


def toy_folder(toy_data: Path, path: Path) -> Path:
    """A new folder at `path` for the toy run, with its data."""
    return Path(shutil.copytree(toy_data, path))


@pytest.mark.slow
def test_the_small_example_at_toy_size(tmp_path: Path) -> None:
    done = start(SMALL, "--metrics-file", str(tmp_path / "metrics.jsonl"), TOY="1", TOY_FOLDER=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"tokenizer, token set and checkpoints are in {tmp_path}" in done.stdout
    assert "saved iteration 4 to" in done.stdout
    assert len(losses(tmp_path)) == 4


@pytest.mark.slow
def test_the_huge_example_at_toy_size(tmp_path: Path, toy_data: Path) -> None:
    """Two tensor ranks, two pipeline ranks of two virtual stages, a batch that grows."""
    folder = toy_folder(toy_data, tmp_path / "toy")
    done = start(HUGE, "--metrics-file", str(folder / "metrics.jsonl"), TOY="1", TOY_FOLDER=str(folder))
    assert done.returncode == 0, done.stderr
    assert "on 4 ranks (cpu): tensor 2 (sequence parallel), pipeline 2 (1f1b, 2 virtual stages each)" in done.stdout
    assert "from 2 by 2 over 6 samples; 5 iterations" in done.stdout
    assert "saved iteration 5 to" in done.stdout
    assert len(losses(folder)) == 5


FAKE_SRUN = """#!/usr/bin/env bash
# A cluster of two nodes on this machine: runs the command once for each, at the same time, as srun does.
shift
for SLURM_NODEID in 1 0; do
  export SLURM_NODEID
  "$@" >"$FAKE_LOGS/$SLURM_NODEID.log" 2>&1 &
  started+=("$!")
done
for process in "${started[@]}"; do wait "$process" || exit 1; done
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames here[0-1]" ] && echo localhost && sleep 0.2 && echo elsewhere
"""


def slurm(tmp_path: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Start the batch script with `words` as Slurm would, from a copy elsewhere, on a cluster of two fake nodes."""
    programs, spool = tmp_path / "bin", tmp_path / "spool"
    programs.mkdir()
    spool.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (spool / "slurm_script").write_text((REPOSITORY / "examples/pretrain.slurm").read_text())
    job = {
        "PATH": f"{programs}{os.pathsep}{environment()['PATH']}",
        "FAKE_LOGS": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "here[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    return start(str(spool / "slurm_script"), *words, **job | variables)


@pytest.mark.parametrize(("script", "ranks"), [(BIG, 16), (HUGE, 8), (BERT, 16)])
def test_the_batch_script_runs_an_example_on_every_node(tmp_path: Path, script: str, ranks: int) -> None:
    done = slurm(tmp_path, script, "--seed", "7", DRY_RUN="1", **DATA, SAVE="/data/run")
    assert done.returncode == 0, done.stderr
    for node in range(2):
        words = shlex.split((tmp_path / f"{node}.log").read_text())
        assert shlex.join(words).startswith(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=1 "
            f"torchrun --nproc-per-node {ranks} --nnodes 2 --node-rank {node} --master-addr localhost "
            "--master-port 24567 "
        )
        assert words[-2:] == ["--seed", "7"]


@pytest.mark.slow
def test_the_big_example_at_toy_size_on_two_nodes_equals_one_node(tmp_path: Path, toy_data: Path) -> None:
    """Two launchers of two ranks each meet as nodes do; four ranks of one launcher train the same."""
    two, one = toy_folder(toy_data, tmp_path / "two"), toy_folder(toy_data, tmp_path / "one")
    metrics = ["--metrics-file", str(two / "metrics.jsonl")]
    done = slurm(tmp_path, BIG, *metrics, TOY="1", TOY_FOLDER=str(two), MASTER_PORT=str(free_port()))
    logs = [path.read_text() for path in sorted(tmp_path.glob("?.log"))]
    assert done.returncode == 0, "\n".join([done.stderr, *logs])
    assert "saved iteration 4 to" in logs[0]
    assert "iteration" not in logs[1]

    done = start(BIG, "--metrics-file", str(one / "metrics.jsonl"), TOY="1", TOY_FOLDER=str(one))
    assert done.returncode == 0, done.stderr
    assert len(losses(one)) == 4
    assert losses(two) == losses(one)
