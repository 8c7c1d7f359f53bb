"""Print what a run's metrics file holds: a table of losses, and the held-out perplexity before and after.

    python examples/quickstart/report.py METRICS.jsonl [--below PERCENT]

Exits with 1 where the held-out loss has not fallen below PERCENT of its start (by default it may be anything).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report of the file named in `argv`."""
    parser = argparse.ArgumentParser(description="Print the losses of a run.")
    parser.add_argument("metrics", type=Path, help="what --metrics-file of the run named")
    parser.add_argument(
        "--below", type=float, help="fail unless the held-out loss fell below this percent of its start"
    )
    asked = parser.parse_args(argv)
    records = read_metrics(asked.metrics)
    before, after = records["validation"][0], records["validation"][-1]
    percent = 100 * after["loss"] / before["loss"]
    print(loss_table(records["train"]))
    print(f"\nheld-out perplexity: {before['perplexity']:.1f} before, {after['perplexity']:.1f} after")
    print(f"held-out loss: {before['loss']:.3f} before, {after['loss']:.3f} after, {percent:.0f} % of its start")
    if asked.below is not None and percent >= asked.below:
        print(f"the held-out loss was to fall below {asked.below:g} % of its start", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
