"""The demonstration of where layer norms stand: its script runs, and its committed figures are those of its losses."""

import csv
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from tests.harness.launch import REPOSITORY, environment, run_command

FOLDER = REPOSITORY / "examples" / "layernorm_placement"
curves = runpy.run_path(str(FOLDER / "curves.py"), run_name="curves")


def committed(name: str) -> dict[tuple[str, int], list[float]]:
    """The losses in a file of the repository, by arrangement and seed."""
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    names = [name for name in rows[0] if name != "iteration"]
    return {(name.rpartition("-")[0], int(name[-1])): [row[name] for row in rows] for name in names}


@pytest.mark.slow
def test_the_demonstration_at_toy_size(tmp_path: Path) -> None:
    """Three runs from nothing, their table and their picture; the last two arrangements are one function."""
    script = str(FOLDER / "run.sh")
    done = run_command(["bash", script, str(tmp_path)], env=environment(TOY="1"), timeout=400)
    assert done.returncode == 0, done.stderr
    losses = {
        name: [json.loads(line)["loss"] for line in (tmp_path / f"{name}-1.jsonl").read_text().splitlines()]
        for name in ("pre", "post", "residual-post")
    }
    assert [len(curve) for curve in losses.values()] == [4, 4, 4]
    np.testing.assert_allclose(losses["residual-post"], losses["post"], rtol=1e-5)
    assert np.abs(np.subtract(losses["pre"], losses["post"])).max() > 1e-3
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    again = run_command(["bash", script, str(tmp_path)], env=environment(TOY="1"))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "losses.md").read_text() in again.stdout


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table of losses, its line of names first."""
    found: list[list[list[str]]] = []
    for line in text.splitlines():
        if line.startswith("| norms |"):
            found.append([])
        if found and line.startswith("| "):
            found[-1].append(line.strip("| ").split(" | "))
    return found


def test_the_tables_are_those_of_the_committed_losses() -> None:
    """Computed here once more: the mean of the last twenty losses at each iteration that is shown."""
    told = tables((FOLDER / "README.md").read_text(encoding="utf-8"))
    files = ("losses.csv", "losses_lower_rate.csv", "losses_lower_rate_48_layers.csv")
    for rows, name in zip(told, files, strict=True):
        runs = committed(name)
        iterations = [int(cell.removeprefix("iteration ")) for cell in rows[0][2:]]
        assert len(rows) - 1 == len(runs) >= 2
        for (norms, seed, *cells), ((arrangement, of), losses) in zip(rows[1:], runs.items(), strict=True):
            assert (norms, int(seed)) == (curves["ARRANGEMENTS"][arrangement], of)
            expected = [np.mean(losses[i - 20 : i]) for i in iterations]
            np.testing.assert_allclose([float(cell) for cell in cells], expected, atol=6e-4)


def test_curves_say_where_there_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert curves["main"]([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: there are no runs in it, which are files such as pre-1.jsonl\n"
    )
