"""Losses of the arrangements of layer norms: `python examples/layernorm_placement/curves.py FOLDER`.

Reads `FOLDER/ARRANGEMENT-SEED.jsonl`, the metrics files of the runs, and `FOLDER/corpus_text_sentence`, what they were
trained on. Writes `losses.csv` (one row an iteration, one column a run), `losses.md` (a table) and `losses.png` (the
curves) beside them.
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data import IndexedDataset
from megatron.pipeline.picture import new_figure
from megatron.training.failure import exit_code

ARRANGEMENTS = {
    "pre": "pre-norm: x + f(LN(x))",
    "post": "post-norm: LN(x + f(x))",
    "residual-post": "residual after the norm: LN(x) + f(LN(x))",
}
# The last two are one function of the weights: the broken line lies on the other.
_LINES = {"pre": ("tab:blue", "solid"), "post": ("tab:red", "solid"), "residual-post": ("black", "dotted")}

_SPECIAL = 5  # ids of [PAD], [UNK], [CLS], [SEP], [MASK], which are not masked

Runs = dict[tuple[str, int], list[float]]


def read_runs(folder: Path) -> Runs:
    """The loss of every iteration, by arrangement and seed. Raises ValueError where there are no runs."""
    runs: Runs = {}
    for name in ARRANGEMENTS:
        files = {int(path.stem.removeprefix(f"{name}-")): path for path in folder.glob(f"{name}-[0-9]*.jsonl")}
        for seed, path in sorted(files.items()):
            runs[name, seed] = [json.loads(line)["loss"] for line in path.read_text(encoding="utf-8").splitlines()]
    if not runs:
        raise ValueError(f"{folder}: there are no runs in it, which are files such as pre-1.jsonl")
    return runs


def loss_by_frequency(folder: Path) -> float:
    """The loss of a model that knows how frequent each word is and nothing else: the entropy of that, in nats."""
    corpus = IndexedDataset(folder / "corpus_text_sentence")
    counts = np.bincount(corpus.get_run(0, len(corpus)))[_SPECIAL:]
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` losses at each iteration, of fewer at the beginning."""
    return [math.fsum(losses[max(0, i - window) : i]) / min(i, window) for i in range(1, len(losses) + 1)]


def table(runs: Runs, window: int, rows: int = 6) -> str:
    """Markdown: smoothed losses at some iterations, a row for each run."""
    last = min(map(len, runs.values()))
    shown = [max(1, round(last * k / rows)) for k in range(1, rows + 1)]
    lines = ["| norms | seed | " + " | ".join(f"iteration {i}" for i in shown) + " |", "|---" * (rows + 2) + "|"]
    for (name, seed), losses in runs.items():
        curve = smoothed(losses, window)
        lines.append(f"| {ARRANGEMENTS[name]} | {seed} | " + " | ".join(f"{curve[i - 1]:.3f}" for i in shown) + " |")
    return "\n".join(lines) + "\n"


def write_csv(path: Path, runs: Runs) -> None:
    """All losses, with four digits behind the point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["iteration", *(f"{name}-{seed}" for name, seed in runs)])
        for i, losses in enumerate(zip(*runs.values(), strict=True), 1):
            writer.writerow([i, *(f"{loss:.4f}" for loss in losses)])


def draw(path: Path, runs: Runs, window: int, by_frequency: float) -> None:
    """The smoothed curves, a colour for each arrangement, and a line where a model has learned frequencies alone."""
    figure, axes, _ = new_figure(7, 4, path.name)
    named: set[str] = set()
    for (name, _), losses in runs.items():
        label = None if name in named else ARRANGEMENTS[name]
        colour, style = _LINES[name]
        axes.plot(range(1, len(losses) + 1), smoothed(losses, window), color=colour, linestyle=style, label=label)
        named.add(name)
    axes.axhline(by_frequency, color="grey", linewidth=0.8, label="frequencies of words alone")
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"masked-LM loss, mean of {window} iterations" if window > 1 else "masked-LM loss")
    axes.legend()
    figure.savefig(path, dpi=80)


def report(folder: Path, window: int) -> None:
    """Write the three files below `folder` and print the table."""
    runs = read_runs(folder)
    write_csv(folder / "losses.csv", runs)
    by_frequency = loss_by_frequency(folder)
    draw(folder / "losses.png", runs, window, by_frequency)
    text = table(runs, window)
    (folder / "losses.md").write_text(text, encoding="utf-8")
    print(f"{text}\nfrequencies of words alone: {by_frequency:.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files of the folder named in `argv` and print the table."""
    parser = argparse.ArgumentParser(description="Table and picture of the losses.")
    parser.add_argument("folder", type=Path, help="where the runs left their metrics files")
    parser.add_argument("--smooth", type=int, default=1, help="iterations of which the mean is shown")
    asked = parser.parse_args(argv)
    return exit_code(lambda: report(asked.folder, asked.smooth))


if __name__ == "__main__":
    sys.exit(main())
