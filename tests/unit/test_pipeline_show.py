"""`python -m megatron.pipeline.show`: the grid is the timeline, the figures are right, complaints are sentences."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from megatron.pipeline import build_schedule, picture, show
from megatron.pipeline.grid import column_time, grid, label
from megatron.pipeline.show import main
from megatron.pipeline.simulate import simulate


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(words)
    return capsys.readouterr().out


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    return capsys.readouterr().err.split("error: ")[1]


def test_a_small_grid_in_full() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 2), 1, 2)
    assert grid(timeline, Fraction(1)).split("\n") == [
        "rank 0 | F0 F1 .  .  B0--- .  B1---",
        "rank 1 | .  F0 B0--- F1 B1---",
    ]


@pytest.mark.parametrize(
    ("shape", "times"),
    [((4, 8, 2), (1, 2, 0)), ((3, 12, 1), (Fraction("0.5"), Fraction("0.75"), 0)), ((11, 22, 3), (2, 2, 1))],
)
def test_a_grid_read_back_is_the_timeline(shape: tuple[int, int, int], times: Sequence[Fraction]) -> None:
    p, m, v = shape
    timeline = simulate(build_schedule("1f1b", p, m, v), *times)
    column = column_time(*map(Fraction, times))
    size = 1 + max(len(label(action, v)) for action in timeline.schedule.actions[0])
    rows = grid(timeline, column).split("\n")
    assert len({row.index("|") for row in rows}) == 1
    for rank, row in enumerate(rows):
        assert row.startswith(f"rank {rank:{len(str(p - 1))}} | ")
        drawn = [(word[0], word.start(), word.end()) for word in re.finditer(r"[FB]\d+[a-z]?-*", row)]
        assert [text.rstrip("-") for text, _, _ in drawn] == [label(a, v) for a in timeline.schedule.actions[rank]]
        left = row.index("|") + 2
        assert [(at - left) / size * column for _, at, _ in drawn] == timeline.starts[rank]
        one_column = [text for text, _, _ in drawn if "-" not in text]
        ends = [-(-(to - left) // size) * column for _, _, to in drawn]
        assert ends == timeline.ends[rank]
        assert one_column or column < min(times[:2])


def test_a_wide_grid_goes_on_in_further_blocks() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 12), 1, 2)
    whole = grid(timeline, Fraction(1)).split("\n")
    blocks = [block.split("\n") for block in grid(timeline, Fraction(1), width=40).split("\n\n")]
    assert len(blocks) > 2
    assert max(len(line) for block in blocks for line in block) <= 40
    for rank in range(2):
        joined = "".join(block[rank][9:].ljust(28) for block in blocks)
        assert joined.rstrip() == whole[rank][9:]


def test_columns_are_never_much_finer_than_a_pass() -> None:
    assert column_time(Fraction(1), Fraction(2), Fraction(0)) == 1
    assert column_time(Fraction("0.3"), Fraction("0.2"), Fraction("0.1")) == Fraction("0.1")
    assert column_time(Fraction(1), Fraction("2.001"), Fraction(0)) == Fraction(1, 8)


def test_the_figures_of_the_interleaved_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--pp", "4", "--vpp", "2", "--microbatches", "8").split("\n")
    assert lines[0] == "interleaved 1F1B, 4 ranks of 2 chunks, 8 micro-batches; a column is 1"
    assert lines[7] == "time 57, bubble 18.75% of the ideal time"
    assert lines[8].endswith("18.75%")
    assert [line.split() for line in lines[11:15]] == [
        ["0", "11", "9"],
        ["1", "9", "9"],
        ["2", "7", "9"],
        ["3", "5", "9"],
    ]


def test_other_schedules_and_the_program_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--pp", "2", "--microbatches", "2", "--schedule", "gpipe", "--program", "1")
    assert text.startswith("GPipe, 2 ranks, 2 micro-batches; a column is 1\n")
    assert text.endswith(
        "rank 1\n"
        "  - receive activation of micro-batch 0 from chunk 0 of rank 0 to chunk 0 of rank 1\n"
        "forward of micro-batch 0 in chunk 0\n"
        "  - receive activation of micro-batch 1 from chunk 0 of rank 0 to chunk 0 of rank 1\n"
        "forward of micro-batch 1 in chunk 0\n"
        "backward of micro-batch 0 in chunk 0\n"
        "  - send gradient of micro-batch 0 from chunk 0 of rank 1 to chunk 0 of rank 0\n"
        "backward of micro-batch 1 in chunk 0\n"
        "  - send gradient of micro-batch 1 from chunk 0 of rank 1 to chunk 0 of rank 0\n"
    )
    text = shown(capsys, "--pp", "1", "--microbatches", "2", "--forward-only")
    assert text.startswith("1F1B, 1 rank, forward passes of 2 micro-batches; a column is 1\n\nrank 0 | F0 F1\n")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--microbatches 6 --vpp 2", "a multiple of --pipeline-model-parallel-size 4; the nearest are 4 and 8\n"),
        ("--forward-time 0", "--forward-time 0: it must be above 0\n"),
        ("--transfer-time -1", "--transfer-time -1: it must be at least 0\n"),
        ("--backward-time long", "argument --backward-time: long: it must be a number\n"),
        ("--program 4", "--program 4: it must be a rank, from 0 to 3\n"),
        ("--pp 0 --microbatches 0", "--pp 0: it must be at least 1\n--microbatches 0: it must be at least 1\n"),
        ("--pp 1 --vpp 2", "--vpp 2: with --pp 1 it must be 1\n"),
        (
            "--microbatches 1 --vpp 2",
            "1 micro-batch: with virtual stages their number must be"
            " a multiple of --pipeline-model-parallel-size 4; the nearest is 4\n",
        ),
    ],
)
def test_complaints(capsys: pytest.CaptureFixture[str], flags: str, sentence: str) -> None:
    assert complaint(capsys, *flags.split()).endswith(sentence)


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_computed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(show, "build_schedule", None)
    assert complaint(capsys, "--png", f"{tmp_path}/absent/a.png").endswith(f"there is no folder {tmp_path}/absent\n")
    assert complaint(capsys, "--png", str(tmp_path)) == f"--png {tmp_path}: it is a folder, and must be a file\n"


def test_times_are_those_of_the_flags_whatever_they_are_counted_in(capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule is simulated in whole numbers of the time that goes into all of them."""
    plain = shown(capsys, "--pp", "3", "--transfer-time", "1").split("\n")
    short = shown(capsys, "--pp", "3", "--forward-time", "0.1", "--backward-time", "0.2", "--transfer-time", "0.1")
    lines = short.split("\n")
    assert lines[0] == plain[0].replace("column is 1", "column is 0.1")
    assert lines[1:5] == plain[1:5]
    at = next(i for i, line in enumerate(plain) if line.startswith("time "))
    assert float(lines[at].split()[1].rstrip(",")) == pytest.approx(float(plain[at].split()[1].rstrip(",")) / 10)
    assert lines[at].split(",")[1] == plain[at].split(",")[1]
    for mine, theirs in zip(lines[-4:-1], plain[-4:-1], strict=True):
        assert float(mine.split()[-1]) == pytest.approx(float(theirs.split()[-1]) / 10)


def test_without_matplotlib_a_picture_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were absent
    text = complaint(capsys, "--png", str(tmp_path / "a.png"))
    assert text == "--png needs the package matplotlib: pip install matplotlib\n"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    shown(capsys, "--vpp", "2", "--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_all_passes_of_a_rank_are_one_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    figure, axes, colormaps = picture.new_figure(8, 2)
    monkeypatch.setattr(picture, "new_figure", lambda width, height: (figure, axes, colormaps))
    timeline = simulate(build_schedule("1f1b", 2, 4, 2), 1, 2)
    picture.draw(timeline, os.devnull, "title", Fraction("0.5"))
    assert len(axes.collections) == 2 and not axes.patches
    for rank, bars in enumerate(axes.collections):
        spans = [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()]
        assert [(2 * start, 2 * end) for start, end in spans] == list(
            zip(timeline.starts[rank], timeline.ends[rank], strict=True)
        )
        kinds = {a.kind for a in timeline.schedule.actions[rank]}
        assert len({tuple(colour) for colour in bars.get_facecolors()}) == len(kinds) * 2


def test_it_runs_as_a_module_and_the_room_s_plain_half_needs_no_torch() -> None:
    program = "import sys, runpy; sys.argv[1:] = []; runpy.run_module('megatron.pipeline.show', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("1F1B, 4 ranks, 8 micro-batches")
    assert done.stdout.endswith("False\n")
    assert done.stderr == ""
