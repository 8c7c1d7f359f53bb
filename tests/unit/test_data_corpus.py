"""Encoding on several processes: none of them outlives the one that started them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import functools, multiprocessing, sys, time
import numpy as np
from megatron.data.corpus import Encoder, encode_sources
from megatron.data.records import Source
from megatron.tokenizer.null import NullTokenizer

def make_encoder():
    return Encoder(NullTokenizer(10), ["text"], False, np.dtype("u2"))

if __name__ == "__main__":
    parts = encode_sources([Source(sys.argv[1], "jsonl")], ["text"], make_encoder, 2)
    next(parts)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # a zombie waits for somebody to look at it, no more


def test_workers_end_when_their_parent_is_killed(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT, encoding="utf-8")
    (tmp_path / "x.jsonl").write_text((json.dumps({"text": "1 " * 1000}) + "\n") * 2000, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "x.jsonl")]
    environment = {"PYTHONPATH": str(repository)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        workers = [int(word) for word in process.stdout.readline().split()]
        assert len(workers) == 2
        assert all(map(is_running, workers))
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
