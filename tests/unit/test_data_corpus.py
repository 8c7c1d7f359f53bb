"""Encoding on several processes: none of them outlives the one that started them."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from megatron.data import corpus

PARENT = """
import multiprocessing, sys, time
import numpy as np
from megatron.data.corpus import Encoder, encode_sources, handed_over
from megatron.data.records import Source
from megatron.tokenizer.null import NullTokenizer

if __name__ == "__main__":
    make = handed_over(Encoder(NullTokenizer(10), ["text"], False, np.dtype("u2")))
    parts = encode_sources([Source(sys.argv[1], "jsonl")], ["text"], make, 2)
    next(parts)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(60)
"""


# Prints what a worker has imported; the file itself imports everything that a tool might.
IMPORTS = """
import sys
import torch, tqdm, yaml
import megatron.training
import numpy as np
from megatron.data.corpus import Encoder, handed_over, WorkerPool
from megatron.tokenizer import TokenizerConfig, build_tokenizer

files = dict(zip(("vocab_file", "merge_file"), sys.argv[1:]))
make = handed_over(Encoder(build_tokenizer(TokenizerConfig(**files)), ["text"], False, np.dtype("u2")))
with WorkerPool(make, 1) as pool:
    print(*pool.submit(eval, "list(__import__('sys').modules)").result())
assert sys.modules["__main__"].IMPORTED is True
"""


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # a zombie waits for somebody to look at it, no more


def test_workers_import_no_more_than_they_need(tmp_path: Path, repository: Path, shared: Path) -> None:
    (tmp_path / "tool.py").write_text("IMPORTED = True\n" + IMPORTS, encoding="utf-8")  # without a guard, too
    files = [str(shared / "data/gpt2" / name) for name in ("gpt2-vocab.json", "gpt2-merges.txt")]
    command = [sys.executable, str(tmp_path / "tool.py"), *files]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(repository)}, check=False)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert {"numpy", "tokenizers", "megatron.data.corpus"} <= imported
    assert not {"torch", "megatron.training", "tqdm", "yaml", "pyarrow", "numba"} & imported


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
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_comes_after_a_worker_is_started_whole(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    launch = SpawnProcess._Popen

    def launch_interrupted(process: Any) -> Any:
        os.kill(os.getpid(), number)
        return launch(process)

    monkeypatch.setattr(SpawnProcess, "_Popen", launch_interrupted)
    before = signal.signal(number, interrupt)
    process = corpus._WorkerProcess(target=print)
    try:
        with pytest.raises(KeyboardInterrupt):
            process.start()
        assert signal.getsignal(number) is interrupt
        assert process in multiprocessing.active_children()
    finally:
        signal.signal(number, before)
    process.join(60)
    assert process.exitcode == 0


def test_a_worker_is_started_in_any_thread() -> None:
    process = corpus._WorkerProcess(target=print)
    thread = threading.Thread(target=process.start)  # where no handler may be set
    thread.start()
    thread.join()
    process.join(60)
    assert process.exitcode == 0
