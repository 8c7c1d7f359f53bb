"""Print what a run's metrics file holds: a table of losses, and the held-out perplexity before and after.

    python examples/quickstart/report.py METRICS.jsonl

Exits with 1 where the held-out loss has not fallen below 60 % of its start.
"""

import json
import sys
from pathlib import Path

TARGET = 0.60
_ROWS = 12


def read_metrics(path: Path) -> dict[str, list[dict[str, float]]]:
    """The records of each split, in the order written."""
    records: dict[str, list[dict[str, float]]] = {"train": [], "validation": [], "test": []}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records[record.pop("split")].append(record)
    return records


def loss_table(train: list[dict[str, float]]) -> str:
    """About a dozen rows of iteration, loss, gradient norm and speed, the last one among them."""
    every = -(-len(train) // _ROWS)
    rows = train[::-1][::every][::-1]
    lines = [f"{'iteration':>9}  {'loss':>7}  {'grad-norm':>9}  {'tokens/s':>8}"]
    lines += [
        f"{row['iteration']:>9.0f}  {row['loss']:>7.3f}  {row['grad-norm']:>9.3f}  {row['tokens-per-second']:>8.0f}"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Print the report of the file named in `argv`."""
    if len(argv) != 1:
        print("usage: report.py METRICS.jsonl", file=sys.stderr)
        return 2
    records = read_metrics(Path(argv[0]))
    before, after = records["validation"][0], records["validation"][-1]
    ratio = after["loss"] / before["loss"]
    print(loss_table(records["train"]))
    print(f"\nheld-out perplexity: {before['perplexity']:.1f} before, {after['perplexity']:.1f} after")
    print(f"held-out loss: {before['loss']:.3f} before, {after['loss']:.3f} after, which is {ratio:.0%} of its start")
    return 0 if ratio < TARGET else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
