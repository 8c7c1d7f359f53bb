"""The ground floor: formulas against the papers' closed forms, configs and their complaints, files whole or absent."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.base import files
from megatron.base.complaints import ConfigError, naming, problems_of, raise_joined
from megatron.base.compose import ComposedConfig, Invalid, combines, compose, make_section, section_types
from megatron.base.config import (
    Config,
    choice_problems,
    flag,
    flag_info,
    flag_name,
    minimum_problems,
    range_problems,
)
from megatron.base.devices import peak_flops
from megatron.base.files import atomic_write, file_problem, fsync_directory, temporary_name
from megatron.base.formulas import (
    gpt_parameters,
    hardware_flops,
    layer_forward_flops,
    layer_parameters,
    model_flops,
    padded_vocab_size,
)

small = st.integers(1, 200)
REPOSITORY = Path(__file__).resolve().parents[2]

# --- formulas ---------------------------------------------------------------------------------------------------------


@given(l=small, h=small, V=st.integers(1, 60_000), s=small)
def test_parameters_are_the_published_closed_form(l: int, h: int, V: int, s: int) -> None:
    published = 12 * l * h**2 * (1 + Fraction(13, 12 * h) + Fraction(V + s, 12 * l * h))
    assert gpt_parameters(l, h, V, s, final_norm=False) == published
    assert gpt_parameters(l, h, V, s) == published + 2 * h


@given(B=small, s=small, l=small, h=small, V=st.integers(1, 60_000))
def test_flops_are_the_published_closed_form(B: int, s: int, l: int, h: int, V: int) -> None:
    published = 72 * B * s * l * h**2 * (1 + Fraction(s, 6 * h) + Fraction(V, 12 * l * h))
    assert model_flops(B, s, l, h, V) == published


@given(B=small, s=small, l=small, h=small, V=st.integers(1, 60_000))
def test_flops_with_every_layer_recomputed_are_the_published_closed_form(
    B: int, s: int, l: int, h: int, V: int
) -> None:
    published = 96 * B * s * l * h**2 * (1 + Fraction(s, 6 * h) + Fraction(V, 16 * l * h))
    assert hardware_flops(B, s, l, h, V, recompute_granularity="full") == published


@given(B=small, s=small, h=small, V=st.integers(1, 60_000), l=small, recomputed=small, f=small, a=small)
def test_flops_of_recomputation_are_those_of_the_layers_recomputed(
    B: int, s: int, l: int, h: int, V: int, recomputed: int, f: int, a: int
) -> None:
    shape = (B, s, l, h, V, f, a)
    model = model_flops(*shape)
    assert hardware_flops(*shape) == model
    full = hardware_flops(*shape, recompute_granularity="full", recomputed_layers=recomputed)
    assert full - model == B * recomputed * 2 * s * (4 * a * h + 2 * f * h + 2 * s * a)
    selective = hardware_flops(*shape, recompute_granularity="selective", recomputed_layers=recomputed)
    assert selective - model == B * recomputed * 2 * s * s * a


def test_published_iterations_at_the_published_rates() -> None:
    """8.3B takes 2.42 s at 15.1 PFLOP/s, a batch of 8 of 1.16B in 1121 ms is 71.9 TFLOP/s: all layers recomputed."""
    whole = hardware_flops(512, 1024, 72, 3072, 51_200, recompute_granularity="full")
    assert f"{whole / 15.1e15:.2f}" == "2.42"
    small_model = hardware_flops(8, 1024, 24, 1920, 51_200, recompute_granularity="full")
    assert f"{small_model / 1.121 / 1e12:.1f}" == "71.9"


@pytest.mark.parametrize(
    ("hidden", "layers", "billions"), [(1536, 40, "1.2"), (1920, 54, "2.5"), (2304, 64, "4.2"), (3072, 72, "8.3")]
)
def test_the_published_scaling_configurations(hidden: int, layers: int, billions: str) -> None:
    count = gpt_parameters(layers, hidden, 51_200, 1024)
    assert f"{count / 1e9:.1f}" == billions


def test_gpt2s_own_count() -> None:
    assert gpt_parameters(12, 768, 50_257, 1024) == 124_439_808


@given(h=small, f=small, a=small)
def test_layer_parameters_with_other_inner_sizes_are_the_sum_of_its_matrices(h: int, f: int, a: int) -> None:
    weights = {"qkv": (3 * a, h), "dense": (h, a), "h_to_f": (f, h), "f_to_h": (h, f)}
    biases = sum(rows for rows, _ in weights.values())
    norms = 4 * h
    assert layer_parameters(h, f, a) == sum(rows * columns for rows, columns in weights.values()) + biases + norms
    assert layer_parameters(h) == layer_parameters(h, 4 * h, h) == 12 * h * h + 13 * h


@given(s=small, h=small, f=small, a=small)
def test_forward_flops_with_other_inner_sizes_are_two_per_multiplication(s: int, h: int, f: int, a: int) -> None:
    matrices = 3 * a * h + a * h + f * h + h * f
    scores_and_values = 2 * s * s * a
    assert layer_forward_flops(s, h, f, a) == 2 * (s * matrices + scores_and_values)


@given(size=st.integers(1, 10**6), divisor=st.integers(1, 512), t=st.integers(1, 64))
def test_padded_vocabulary_is_the_least_multiple(size: int, divisor: int, t: int) -> None:
    padded = padded_vocab_size(size, divisor, t)
    assert padded % (divisor * t) == 0
    assert size <= padded < size + divisor * t


def test_the_published_padded_vocabulary() -> None:
    assert padded_vocab_size(50_257, 128, 8) == 51_200


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("Tesla V100-SXM3-32GB", 125e12, 15.7e12),
        ("Tesla V100-PCIE-16GB", 112e12, 14e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H200 NVL", 835e12, 60e12),
    ],
)
def test_peak_of_devices_by_the_names_that_drivers_report(name: str, half: float, single: float) -> None:
    assert (peak_flops(name, 2), peak_flops(name, 4)) == (half, single)


def test_no_peak_is_told_where_none_is_known() -> None:
    assert peak_flops("NVIDIA H100 PCIe", 8) is None
    assert peak_flops("Some Future Device", 2) is None


# --- configs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Oven(Config):
    """An oven."""

    heat: int = flag(180, "degrees Celsius", aliases=["temperature"])
    share: float = flag(0.5, "share of the power")
    mode: str = flag("fan", "how it heats", choices=["fan", "grill"])
    minutes: float | None = flag(None, "how long")

    def problems(self) -> list[str]:
        return [
            *minimum_problems(self, 1, "heat", "minutes"),
            *range_problems(self, 0, 1, "share"),
            *choice_problems(self),
        ]


@dataclasses.dataclass(frozen=True)
class Dish(Config):
    """A dish."""

    portions: int = flag(dataclasses.MISSING, "for how many")
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Kitchen(ComposedConfig):
    """All of it."""

    oven: Oven
    dish: Dish
    name: str = "home"
    ignored_flags: ClassVar[dict[str, str]] = {"gas": "electric"}

    @combines("oven", "dish")
    def sizes_fit(self, world_size: int) -> list[str]:
        return ["--portions is too many for --heat"] if self.dish.portions * world_size > self.oven.heat else []


def test_a_right_config_is_made_and_cannot_be_changed() -> None:
    oven = Oven(minutes=20.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        oven.heat = 3  # type: ignore[misc]


def test_all_complaints_come_at_once_and_name_flag_value_and_what_is_accepted() -> None:
    with pytest.raises(ConfigError) as caught:
        Oven(heat=0, share=1.0, mode="microwave", minutes=0.5)
    assert caught.value.problems == [
        "--heat 0: it must be at least 1",
        "--minutes 0.5: it must be at least 1",
        "--share 1.0: it must be at least 0 and below 1",
        "--mode microwave: accepted are fan, grill",
    ]
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert isinstance(caught.value, ValueError)


def test_none_is_not_offered_as_a_value() -> None:
    @dataclasses.dataclass(frozen=True)
    class Timer(Config):
        sound: str | None = flag(None, "at the end", choices=(None, "bell", "horn"))

        def problems(self) -> list[str]:
            return choice_problems(self)

    assert Timer().sound is None
    with pytest.raises(ConfigError, match=r"^--sound None: accepted are bell, horn, or leave it out$"):
        Timer("None")


@pytest.mark.parametrize("minutes", [float("inf"), float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_below_every_minimum(minutes: float) -> None:
    with pytest.raises(ConfigError, match="--minutes"):
        Oven(minutes=minutes)
    with pytest.raises(ConfigError, match="--share"):
        Oven(share=minutes)


def test_a_number_too_large_for_a_float_is_compared_all_the_same() -> None:
    assert Oven(heat=10**400).heat == 10**400


def test_flag_information_of_fields() -> None:
    heat, *_ = dataclasses.fields(Oven)
    info = flag_info(heat)
    assert info is not None
    assert (info.doc, info.choices, info.aliases) == ("degrees Celsius", None, ("temperature",))
    assert flag_info(dataclasses.fields(Dish)[1]) is None
    assert flag_name("micro_batch_size") == "--micro-batch-size"


def test_joined_complaints() -> None:
    raise_joined([])
    with pytest.raises(ConfigError, match="one\ntwo"):
        raise_joined(iter(["one", "two"]))
    assert problems_of(ConfigError(["a", "b"])) == ["a", "b"]
    assert problems_of(ValueError("plain")) == ["plain"]


def test_sections_are_the_fields_that_are_configs() -> None:
    assert section_types(Kitchen) == {"oven": Oven, "dish": Dish}


def test_each_section_takes_what_it_owns() -> None:
    kitchen = compose(Kitchen, {"heat": 200, "portions": 4, "unknown": 1}, world_size=2)
    assert (kitchen.oven, kitchen.dish, kitchen.name) == (Oven(heat=200), Dish(4), "home")


@pytest.mark.parametrize(
    ("place", "sentence", "told"),
    [
        ("bert", "it is of a bert-encoder", "bert: it is of a bert-encoder"),
        ("./bert/", "bert: there is no model in it", "bert: there is no model in it"),
        ("bert", "bert/config.json: it is no file", "bert/config.json: it is no file"),
        ("bert", "tensors of a/bert: two are missing", "bert: tensors of a/bert: two are missing"),
        ("/data/a+b", "cannot open '/data/a+b/model'", "cannot open '/data/a+b/model'"),
    ],
)
def test_a_place_is_said_once(place: str, sentence: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught, naming(place):
        raise ValueError(sentence)
    assert problems_of(caught.value) == [told]


def test_complaints_of_all_sections_are_gathered() -> None:
    values = {"heat": 0, "mode": "none", "minutes": Invalid("--minutes long: it must be a number")}
    with pytest.raises(ConfigError) as caught:
        compose(Kitchen, values, world_size=1, problems=["--gaz is not known"])
    assert caught.value.problems == [
        "--gaz is not known",
        "--minutes long: it must be a number",
        "--portions is not given, and there is no default for it",
    ]
    with pytest.raises(ConfigError) as caught:
        compose(Kitchen, {"heat": 0, "mode": "none"}, world_size=1)
    assert caught.value.problems == [
        "--heat 0: it must be at least 1",
        "--mode none: accepted are fan, grill",
        "--portions is not given, and there is no default for it",
    ]


def test_the_combination_is_checked_on_that_many_ranks() -> None:
    compose(Kitchen, {"portions": 90}, world_size=2)
    with pytest.raises(ConfigError, match="too many"):
        compose(Kitchen, {"portions": 91}, world_size=2)
    with pytest.raises(ConfigError) as caught:
        compose(Kitchen, {"portions": 91}, world_size=2, problems=["earlier"])
    assert caught.value.problems == ["earlier", "--portions is too many for --heat"]


def test_what_was_found_before_is_raised_even_if_all_else_is_right() -> None:
    with pytest.raises(ConfigError, match="earlier"):
        compose(Kitchen, {"portions": 1}, world_size=1, problems=["earlier"])


def test_an_obligatory_value_may_not_be_none() -> None:
    with pytest.raises(ConfigError, match="--portions is not given"):
        make_section(Dish, {"portions": None})


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_only_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "tracker.txt"
    path.write_text("old")
    with atomic_write(path) as stream:
        stream.write("new ü")
        stream.flush()
        assert path.read_text() == "old"
    assert path.read_bytes() == "new ü".encode()
    assert os.listdir(tmp_path) == ["tracker.txt"]


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    with atomic_write(str(tmp_path / "data"), "wb") as stream:
        stream.write(b"\x00\r\n\xff")
    assert (tmp_path / "data").read_bytes() == b"\x00\r\n\xff"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("before", ["old", None])
def test_an_exception_leaves_what_was_there(tmp_path: Path, error: type[BaseException], before: str | None) -> None:
    path = tmp_path / "tracker.txt"
    if before is not None:
        path.write_text(before)

    def fail() -> None:
        with atomic_write(path) as stream:
            stream.write("half")
            raise error

    with pytest.raises(error):
        fail()
    assert os.listdir(tmp_path) == ([] if before is None else ["tracker.txt"])
    assert before is None or path.read_text() == before


def test_a_missing_folder_is_told_by_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "none" / "file"):
        pass


def test_where_no_file_can_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert file_problem("new") is file_problem("file") is file_problem(tmp_path / "new") is None
    for folder in (".", "", "../" + tmp_path.name, tmp_path):
        assert file_problem(folder) == "it is a folder, and must be a file"
    for folder in ("none", "file"):
        told = f"it must be a file in a folder that exists, and there is no folder {folder}"
        assert file_problem(f"{folder}/new") == told
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    assert file_problem("new") == f"this process may not write in {tmp_path}"


def test_a_failed_rename_removes_the_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "target" / "child").mkdir(parents=True)
    with pytest.raises(OSError, match="target"), atomic_write(tmp_path / "target") as stream:
        stream.write("a folder stands there")
    assert os.listdir(tmp_path) == ["target"]


def test_content_reaches_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        happened.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "content")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        happened.append("rename")
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", noted_fsync)
    monkeypatch.setattr(files.os, "replace", noted_replace)
    with atomic_write(tmp_path / "file") as stream:
        stream.write("x")
    assert happened == ["content", "rename", "folder"]


WRITE_AND_WAIT = """
import sys, time
from megatron.base.files import atomic_write
with atomic_write(sys.argv[1]) as stream:
    stream.write("half")
    stream.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "tracker.txt"
    path.write_text("old")
    command = [sys.executable, "-c", WRITE_AND_WAIT, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    assert path.read_text() == "old"
    left = [name for name in os.listdir(tmp_path) if name != "tracker.txt"]
    assert all(name.startswith(".tracker.txt.") and name.endswith(".tmp") for name in left)
    with atomic_write(path) as stream:
        stream.write("next")
    assert path.read_text() == "next"


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    start = threading.Barrier(8)

    def write(letter: str) -> None:
        with atomic_write(path) as stream:
            stream.write(letter * 1000)
            stream.flush()
            start.wait()
            stream.write(letter * 1000)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = path.read_text()
    assert len(content) == 2000
    assert len(set(content)) == 1
    assert os.listdir(tmp_path) == ["file"]


def test_temporary_names_are_hidden_beside_the_file_and_never_the_same(tmp_path: Path) -> None:
    first, second = temporary_name(tmp_path / "file"), temporary_name(tmp_path / "file")
    assert first != second
    assert first.parent == tmp_path
    assert first.name.startswith(".file.")


@pytest.mark.parametrize(("number", "raised"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_folders_that_cannot_be_synced_pass_but_disk_errors_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: bool
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", refuse)
    if raised:
        with pytest.raises(OSError, match=os.strerror(number)):
            fsync_directory(tmp_path)
    else:
        fsync_directory(tmp_path)
