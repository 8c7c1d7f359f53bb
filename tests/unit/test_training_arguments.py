"""Flags from config fields, YAML files, and the collected complaints."""

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.base.complaints import ConfigError
from megatron.base.compose import ComposedConfig, combines, section_types
from megatron.base.config import Config, flag, minimum_problems
from megatron.training.arguments import add_config_flags, config_from_namespace, parse_composed
from megatron.training.bert import BertRunConfig
from megatron.training.config import RunConfig
from megatron.training.launcher import Launch, local_rank, speaks_for_node
from tests.harness.runs import flags


@dataclasses.dataclass(frozen=True)
class Engine(Config):
    """An engine."""

    cylinders: int = flag(dataclasses.MISSING, "how many")
    power: float | None = flag(None, "in kW", aliases=["kilowatts"])
    turbo: bool = flag(False, "with a charger")
    fuels: tuple[str, ...] = flag((), "what it burns")

    def problems(self) -> list[str]:
        return minimum_problems(self, 1, "cylinders", "power")


@dataclasses.dataclass(frozen=True)
class Body(Config):
    """A body."""

    doors: int = flag(4, "how many")

    def problems(self) -> list[str]:
        return minimum_problems(self, 2, "doors")


@dataclasses.dataclass(frozen=True)
class Car(ComposedConfig):
    """A car."""

    engine: Engine
    body: Body

    @combines("engine", "body")
    def sizes_fit(self, world_size: int) -> list[str]:
        return ["too many doors"] if self.body.doors > self.engine.cylinders + world_size else []


def parse(*words: str, world_size: int = 1) -> Car:
    return parse_composed(Car, words, world_size=world_size)


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(*words)
    return caught.value.problems


def test_values_are_read_into_their_sections() -> None:
    car = parse("--cylinders", "6", "--kilowatts", "90.5", "--turbo", "--fuels", "gas", "oil", "--doors=2")
    assert car == Car(Engine(6, 90.5, True, ("gas", "oil")), Body(2))
    assert parse("--cylinders", "6").engine == Engine(6)
    assert parse("--cylinders", "6", "--turbo", "--no-turbo").engine.turbo is False


def test_all_complaints_come_together() -> None:
    assert problems("--cylinders", "0", "--doors", "1", "--powr", "9", "--fuels", "gas") == [
        "--powr is not known, the nearest is --power; --help lists all flags",
        "--cylinders 0: it must be at least 1",
        "--doors 1: it must be at least 2",
    ]


def test_no_words_at_all_leave_every_obligatory_flag_to_be_told() -> None:
    with pytest.raises(ConfigError, match="--num-layers is not given") as caught:
        parse_composed(RunConfig, [])
    assert "--lr is not given" in str(caught.value)


def test_missing_and_unreadable_values_are_told() -> None:
    assert problems("--power", "strong") == [
        "--cylinders is not given, and there is no default for it",
        "--power strong: it must be a number",
    ]
    assert problems("--cylinders", "6.5") == ["--cylinders 6.5: it must be a whole number"]


def test_what_argparse_would_end_at_is_told_with_the_rest(tmp_path: Path) -> None:
    unknown = "--powr is not known, the nearest is --power; --help lists all flags"
    doors = "--doors 1: it must be at least 2"
    on, off = "; --turbo turns it on", "; --no-turbo turns it off"
    for words, problem in (
        (["--turbo=false"], f"--turbo false: it takes no value{off}"),
        (["--turbo", "false"], f"--turbo false: it takes no value{off}"),
        (["--no-turbo=yes"], f"--no-turbo yes: it takes no value{on}"),
        (["--turbo=maybe", "--turbo"], f"--turbo maybe: it takes no value{off}"),
        (["--power"], "--power: no value follows it; it must be a number"),
        (["--power", "--turbo"], "--power: no value follows it; it must be a number"),
        (["--kilowatts"], "--kilowatts: no value follows it; it must be a number"),
        (["--fuels"], "--fuels: no value follows it"),
        (["--cylinders"], "--cylinders: no value follows it; it must be a whole number"),
    ):
        assert problems("--cylinders", "3", "--powr=9", "--doors=1", *words) == [unknown, problem, doors]
    path = tmp_path / "car.yaml"
    path.write_text("turbo: 'no'\nfuels: []\ndoors: 1\n")
    assert problems("--config", str(path)) == [
        "--cylinders is not given, and there is no default for it",
        f"--turbo no: it takes no value{off}",
        "--fuels: no value follows it",
        doors,
    ]
    assert problems("--cylinders", "3", "--doors", "1", "--config") == ["--config: no value follows it", doors]
    assert problems("--cylinders", "3", "--doors", "1", "-horses", "9") == [
        "-horses is not known; --help lists all flags",
        doors,
    ]
    assert parse("--cylinders", "3", "--fuels", "- a b").engine.fuels == ("- a b",)


def test_a_run_says_what_its_flags_accept() -> None:
    words = ["--mmap-warmup=1", "--overlap-param-gather=false", "--optimizer", "--recompute-method", "None"]
    with pytest.raises(ConfigError) as caught:
        parse_composed(RunConfig, [*flags("data"), *words], world_size=1, check_inputs=False)
    assert caught.value.problems == [
        "--mmap-warmup 1: it takes no value",
        "--recompute-method None: accepted are uniform, block, or leave it out",
        "--optimizer: no value follows it; it must be one of adam, sgd",
        "--overlap-param-gather false: it takes no value; --no-overlap-param-gather turns it off",
    ]


def test_combinations_are_checked_and_depend_on_the_world() -> None:
    assert problems("--cylinders", "2", "--doors", "4") == ["too many doors"]
    assert parse("--cylinders", "2", "--doors", "4", world_size=2).body.doors == 4


def test_abbreviations_are_not_guessed() -> None:
    assert "--cyl is not known" in problems("--cyl", "6")[0]


def test_yaml_file_reads_like_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "car.yaml"
    path.write_text("cylinders: 6\npower: 1e2\nturbo: true\nfuels: [gas, oil]\ndoors: null\n")
    assert parse("--config", str(path)) == Car(Engine(6, 100.0, True, ("gas", "oil")), Body(4))
    assert parse("--config", str(path), "--cylinders", "8", "--no-turbo").engine == Engine(
        8, 100.0, False, ("gas", "oil")
    )


@pytest.mark.parametrize(
    "content",
    [
        "- a\n- b\n",
        "a: [1\n",
        "\x00",
        "0",
        "false",
        "[]",
        "a: 2024-13-45",
        "a-b: 1\na_b: 2",
        "[" * 3000,
        "config: b.yaml",
        "a: !!bool abc",
        "a: !!timestamp soon",
        "a: !!int x",
        "a: !!int ''",
        "a: !!float x",
        "a: !!binary é",
        "a: !!binary eA==",
        "a: !!set {b, c}",
        "a: !!pairs [b: c]",
        "a: [[1]]",
        "a: !!python/object/apply:os.getcwd []",
        "? [a]\n: 1",
    ],
)
def test_yaml_file_that_is_no_mapping_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "car.yaml"
    path.write_text(content)
    (problem,) = problems("--config", str(path))
    assert str(path) in problem and "\n" not in problem


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**4000])
def test_whole_numbers_have_64_bits(tmp_path: Path, number: int) -> None:
    path = tmp_path / "car.yaml"
    path.write_text(f"cylinders: {number}\n")
    expected = [f"--cylinders {number}: it must be a whole number of 64 bits"]
    assert problems("--config", str(path)) == problems("--cylinders", str(number)) == expected
    assert parse("--cylinders", str(2**63 - 1)).engine.cylinders == 2**63 - 1


@pytest.mark.parametrize("ranks", ["0", "-1", "two", ""])
def test_the_number_of_ranks_of_the_launcher(monkeypatch: pytest.MonkeyPatch, ranks: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ValueError, match=f"^WORLD_SIZE {ranks}: the launcher must set it to a whole number"):
        parse_composed(RunConfig, flags("data"), check_inputs=False)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK x: the launcher must set it to a whole number of at least 0, or not at all"),
        (
            {"LOCAL_RANK": "-1"},
            "LOCAL_RANK -1: the launcher must set it to a whole number of at least 0, or not at all",
        ),
        ({"RANK": "one"}, "RANK one: the launcher must set it to a whole number of at least 0, or not at all"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2: the launcher must set it to a number below WORLD_SIZE, 2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE 2: there is no RANK beside it; the launcher must set both or none"),
        ({"RANK": "2"}, "RANK 2: there is no WORLD_SIZE beside it; the launcher must set both or none"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "a"},
            "MASTER_PORT a: the launcher must set it to a whole number of at least 0, or not at all",
        ),
    ],
)
def test_what_a_launcher_may_not_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], sentence: str
) -> None:
    """One sentence and exit code 2, also from a program that does not know whether it is the one to speak."""
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SystemExit) as ended:
        pretrain_gpt.main(flags("data"))
    assert ended.value.code == 2 and capsys.readouterr().err == f"error: {sentence}\n"


def test_variables_that_other_launchers_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """With spaces, as `wc` writes numbers; and those of who has made the process group without them."""
    for name, text in {"RANK": " 3", "LOCAL_RANK": "1\n", "WORLD_SIZE": "       4"}.items():
        monkeypatch.setenv(name, text)
    assert (Launch.of_environment(), local_rank()) == (Launch(3, 4), 1)
    monkeypatch.delenv("RANK")
    assert local_rank() == 1 and not speaks_for_node()


def test_unknown_name_in_yaml_is_told(tmp_path: Path) -> None:
    path = tmp_path / "car.yaml"
    path.write_text("cylinders: 6\nxyz: 4\n")
    assert problems("--config", str(path)) == ["--xyz is not known; --help lists all flags"]
    assert "cannot be read" in problems("--config", str(tmp_path / "none.yaml"))[0]


def test_one_config_alone_for_tools() -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser, Engine)
    assert config_from_namespace(Engine, parser.parse_args(["--cylinders", "3", "--fuels", "gas"])) == Engine(
        3, fuels=("gas",)
    )
    with pytest.raises(ConfigError, match="whole number"):
        config_from_namespace(Engine, parser.parse_args(["--cylinders", "x"]))


def test_every_flag_of_a_run_has_a_help_line_and_one_owner(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_composed(RunConfig, ["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--tensor-model-parallel-size" in text and "--lr-warmup-fraction" in text
    names = [f.name for section in dataclasses.fields(RunConfig) for f in dataclasses.fields(section.type)]  # type: ignore[arg-type]
    assert len(names) == len(set(names))


def test_old_names_of_megatron_lm_are_read() -> None:
    words = flags("data", tensor_model_parallel_size=None, micro_batch_size=None)
    config = parse_composed(
        RunConfig, [*words, "--model-parallel-size", "2", "--batch-size", "4"], world_size=2, check_inputs=False
    )
    assert config.distributed.tensor_model_parallel_size == 2
    assert config.training.micro_batch_size == 4
    sizes = config.batch_sizes(2)
    assert (sizes.global_batch_size, sizes.num_micro_batches) == (8, 2)


def test_flags_for_what_is_not_here_are_refused_by_name() -> None:
    words = [*flags("data"), "--fp16-lm-cross-entropy", "--openai-gelu", "--vocab", "x"]
    with pytest.raises(ConfigError) as caught:
        parse_composed(RunConfig, words, world_size=1, check_inputs=False)
    assert caught.value.problems == [
        "--fp16-lm-cross-entropy is a flag of Megatron-LM for something that is not supported here",
        "--openai-gelu is a flag of Megatron-LM for something that is not supported here",
        "--vocab is not known, the nearest is --vocab-file; --help lists all flags",
    ]


def test_later_flags_for_what_is_not_here_are_refused_with_their_values() -> None:
    line = "--position-embedding-type rope --swiglu --num-experts 8 --normalization=RMSNorm --ckpt-format torch_dist"
    with pytest.raises(ConfigError) as caught:
        parse_composed(RunConfig, [*flags("data"), *line.split()], world_size=1, check_inputs=False)
    names = ("position-embedding-type", "swiglu", "num-experts", "normalization", "ckpt-format")
    told = "is a flag of Megatron-LM for something that is not supported here"
    assert caught.value.problems == [f"--{name} {told}" for name in names]


def test_flags_that_have_another_name_here_are_refused_with_it() -> None:
    line = "--activations-checkpoint-method uniform --activations_checkpoint_num_layers=2 --recompute-activations"
    with pytest.raises(ConfigError) as caught:
        parse_composed(RunConfig, [*flags("data"), *line.split()], world_size=1, check_inputs=False)
    full = "is not known; --recompute-granularity full with"
    assert caught.value.problems == [
        f"--activations-checkpoint-method {full} --recompute-method asks for the same here",
        f"--activations_checkpoint_num_layers {full} --recompute-num-layers asks for the same here",
        "--recompute-activations is not known; --recompute-granularity selective asks for the same here",
    ]
    known = {name.replace("_", "-") for s in section_types(RunConfig).values() for name in s.__dataclass_fields__}
    for words in RunConfig.renamed_flags.values():
        named = {word.removeprefix("--").removeprefix("no-") for word in words.split() if word.startswith("--")}
        assert named <= known


def test_flags_of_the_other_program_are_refused_with_its_name() -> None:
    for words, kind, program in (
        ("--mask-prob 0.2 --bert-no-binary-head", RunConfig, "pretrain_bert.py"),
        ("--reset-position-ids --eod_mask_loss", BertRunConfig, "pretrain_gpt.py"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_composed(kind, [*flags("data"), *words.split()], world_size=1, check_inputs=False)
        names = [word for word in words.split() if word.startswith("--")]
        assert caught.value.problems == [f"{name} is a flag of {program}, not of this program" for name in names]
    known = {name for s in section_types(BertRunConfig).values() for name in s.__dataclass_fields__}
    assert {name.replace("-", "_") for name in RunConfig.flags_elsewhere} <= known


def test_the_nearest_flag_is_the_shortest_that_is_begun_and_a_stray_word_is_called_one() -> None:
    line = [*flags("data"), "--no-bf16", "stray", "--num-layer", "3"]
    with pytest.raises(ConfigError) as caught:
        parse_composed(RunConfig, line, world_size=1, check_inputs=False)
    assert caught.value.problems == [
        "--num-layer is not known, the nearest is --num-layers; --help lists all flags",
        "--no-bf16 stray: it takes no value; --bf16 turns it on",
    ]
    with pytest.raises(ConfigError, match="'stray' belongs to no flag; --help lists all flags"):
        parse_composed(RunConfig, ["stray", *flags("data")], world_size=1, check_inputs=False)


def test_foreign_flags_are_none_of_ours() -> None:
    known = {f.name.replace("_", "-") for s in dataclasses.fields(RunConfig) for f in dataclasses.fields(s.type)}  # type: ignore[arg-type]
    ignored = {words.split()[0] for words in RunConfig.ignored_flags}
    refused = (
        RunConfig.unsupported_flags
        | RunConfig.renamed_flags.keys()
        | {name for name, program in RunConfig.flags_elsewhere.items() if program != "pretrain_gpt.py"}
    )
    assert not known & (refused | ignored)
    assert not ignored & refused
    assert not RunConfig.unsupported_flags & RunConfig.renamed_flags.keys()


def test_a_section_may_keep_back_flags_of_the_class_that_it_derives_from(capsys: pytest.CaptureFixture[str]) -> None:
    """The field is there with its default, another section has the flag, and an ignored flag is no value of it."""

    @dataclasses.dataclass(frozen=True)
    class Diesel(Engine):
        """A diesel."""

        no_flags = frozenset({"fuels", "power"})

    @dataclasses.dataclass(frozen=True)
    class Tank(Config):
        """A tank."""

        fuels: int = flag(1, "how many it holds")

    @dataclasses.dataclass(frozen=True)
    class Truck(ComposedConfig):
        """A truck."""

        engine: Diesel
        tank: Tank
        ignored_flags = {"power VALUE": "it is always the same"}

    truck = parse_composed(Truck, ["--cylinders", "6", "--fuels", "2", "--power", "90"])
    assert truck == Truck(Diesel(6), Tank(2))
    assert "--power is ignored: it is always the same" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--kilowatts is not known"):
        parse_composed(Truck, ["--cylinders", "6", "--kilowatts", "90"])


def test_ignored_flags_take_their_values_and_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lazy-mpu-init: true\ntensorboard-queue-size: 5\n")
    words = [*flags("data"), "--DDP-impl", "local", "--no-bias-gelu-fusion", "--config", str(path)]
    parse_composed(RunConfig, words, world_size=1, check_inputs=False)
    told = capsys.readouterr().out
    assert "--DDP-impl is ignored: gradients always lie in contiguous buffers" in told
    for name in ("no-bias-gelu-fusion", "lazy-mpu-init", "tensorboard-queue-size"):
        assert f"--{name} is ignored: " in told
    assert told.count("is ignored") == 4


# What the example scripts of Megatron-LM 2.5 for pretraining a GPT pass, one of them or another.
OLD_SCRIPT = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 4 --global-batch-size 8
    --seq-length 16 --max-position-embeddings 16 --lr-decay-style cosine --data-path x --vocab-file v --merge-file m
    --tokenizer-type NullTokenizer --vocab-size 100 --data-impl mmap --split 949,50,1 --distributed-backend nccl
    --lr 0.00015 --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --log-interval 100 --save-interval 10000 --save s
    --eval-interval 1000 --eval-iters 10 --init-method-std 0.006 --adam-beta1 0.9 --adam-beta2 0.95
    --checkpoint-activations --checkpoint-num-layers 1 --fp16 --tensor-model-parallel-size 2 --DDP-impl local
    --tensorboard-dir t --use-contiguous-buffers-in-ddp --loss-scale 1024 --attention-softmax-in-fp32
"""


@pytest.mark.parametrize(
    "length",
    [
        "--train-iters 500000 --lr-decay-iters 320000 --lr-warmup-fraction .01",
        "--rampup-batch-size 8 8 5859 --train-samples 146484 --lr-decay-samples 126953 --lr-warmup-samples 183",
    ],
)
def test_old_launch_scripts_start(length: str) -> None:
    config = parse_composed(RunConfig, [*OLD_SCRIPT.split(), *length.split()], world_size=2, check_inputs=False)
    assert config.precision.dtype == torch.float16
    assert config.recompute.granularity == "full"
    assert config.iterations(2) == (500000 if "iters" in length else 146484 // 8)
    assert config.samples(2) == (8 * 500000 if "iters" in length else 146484)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--train-samples 8", "--train-iters 20 and --train-samples 8: give one of them"),
        ("--lr-decay-samples 8", "--lr-warmup-iters 2: it must not be above --lr-decay-samples 8"),
        (
            "--lr-warmup-iters 0 --lr-warmup-samples 161",
            "--lr-warmup-samples 161: it must not be above --train-iters 20",
        ),
        ("--sequence-parallel --seq-length 15", "--seq-length 15: with --sequence-parallel it must be a multiple of"),
        ("--recompute-granularity full --recompute-num-layers 3", "--recompute-num-layers 3: it must be at most"),
        ("--recompute-num-layers 2", "--recompute-num-layers 2: it needs --recompute-granularity full"),
        ("--checkpoint-activations --recompute-granularity selective", "--checkpoint-activations: it means full"),
        ("--distribute-saved-activations", "--distribute-saved-activations: it needs --recompute-granularity full"),
        (
            "--distribute-checkpointed-activations --checkpoint-activations --sequence-parallel",
            "--distribute-saved-activations: with --sequence-parallel a rank keeps its share already",
        ),
        (
            "--distribute-saved-activations --checkpoint-activations --tensor-model-parallel-size 1",
            "--distribute-saved-activations: it needs --tensor-model-parallel-size above 1",
        ),
        ("--fp16 --bf16", "--fp16 and --bf16: give one of them"),
        ("--loss-scale 128", "--loss-scale 128.0: only --fp16 scales the loss"),
        ("--bf16 --params-dtype float64", "--bf16 and --params-dtype float64: give one of them"),
        ("--overlap-param-gather", "--overlap-param-gather: it needs --use-distributed-optimizer"),
        ("--optimizer lamb", "--optimizer lamb: accepted are adam, sgd"),
        ("--ddp-bucket-size 0", "--ddp-bucket-size 0: it must be at least 1"),
    ],
)
def test_mixtures_that_cannot_be(words: str, sentence: str) -> None:
    line = [*flags("data", tensor_model_parallel_size=2), *words.split()]
    with pytest.raises(ConfigError) as caught:
        parse_composed(RunConfig, line, world_size=2, check_inputs=False)
    assert len(caught.value.problems) == 1
    assert sentence in caught.value.problems[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "--train-iters is not given, and neither is --train-samples: give one of them"),
        ("--train-samples 7", "--train-samples 7: it must be at least 8, one global batch"),
        ("--train-samples 80 --lr-warmup-iters 11", "--lr-warmup-iters 11: it must not be above --train-samples 80"),
    ],
)
def test_how_long_to_train_is_said_in_one_way(words: str, sentence: str) -> None:
    line = [*flags("data", train_iters=None, lr_warmup_iters=None), *words.split()]
    with pytest.raises(ConfigError) as caught:
        parse_composed(RunConfig, line, world_size=1, check_inputs=False)
    assert len(caught.value.problems) == 1
    assert sentence in caught.value.problems[0]


def test_a_negative_number_is_a_value() -> None:
    assert problems("--cylinders", "-1e+2", "--power", "-1e-4") == [
        "--cylinders -1e+2: it must be a whole number",
    ]
    assert problems("--cylinders", "6", "--power", "-1e-4") == ["--power -0.0001: it must be at least 1"]


def test_a_yaml_file_has_no_sections(tmp_path: Path) -> None:
    path = tmp_path / "car.yaml"
    path.write_text("engine:\n  cylinders: 6\n")
    assert "engine holds further names" in problems("--config", str(path))[0]
