"""examples/quickstart.sh from beginning to end, with few iterations: every step runs and leaves what it promises."""

import json
import runpy
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.launch import REPOSITORY, environment, run_command

# By its path: other packages bring a top-level `examples` of their own.
report = runpy.run_path(str(REPOSITORY / "examples" / "quickstart" / "report.py"), run_name="report")["main"]


@pytest.mark.slow
def test_quickstart_at_toy_size(tmp_path: Path) -> None:
    done = run_command(["bash", "examples/quickstart.sh", str(tmp_path)], env=environment(TOY="1"), timeout=400)
    assert done.returncode == 0, done.stderr
    for words in ("documents,", "held-out perplexity:", "held-out loss:", "def read_", "saved iteration 4 to"):
        assert words in done.stdout
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if r["split"] == "validation"]
    assert losses[-1] < losses[0]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss", "lr", "grad-norm", "validation/loss"} <= set(events.Tags()["scalars"])


def test_report_judges_the_held_out_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"split": "validation", "iteration": i, "loss": v, "perplexity": 1.0} for i, v in ((0, 8.0), (9, 5.0))]
    train = [
        {"split": "train", "iteration": i, "loss": 8.0, "grad-norm": 1.0, "tokens-per-second": 1} for i in range(30)
    ]
    path.write_text("\n".join(json.dumps(r) for r in [*train, *records]))
    assert report([str(path), "--below", "63"]) == 0
    assert "62 % of its start" in capsys.readouterr().out
    assert report([str(path), "--below", "62"]) == 1
    assert report([str(path)]) == 0
