"""tools/serve.py on two ranks: the texts of tools/generate_text.py over HTTP, until a signal ends it; mistakes."""

import contextlib
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from torch.distributed import TCPStore

from tests.harness.http_server import ask
from tests.harness.launch import REPOSITORY, environment
from tests.harness.ranks import Ranks
from tests.harness.runs import flags, run_pretrain, write_documents

TOOL = REPOSITORY / "tools" / "serve.py"


@pytest.fixture(scope="module")
def checkpoints(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    words = flags(write_documents(folder / "documents"), train_iters=4, lr=1e-2, eval_iters=0, save=folder / "tiny")
    ranks(1, run_pretrain, words)
    return str(folder / "tiny")


@contextlib.contextmanager
def two_ranks(*words: str) -> Iterator[tuple[list["subprocess.Popen[str]"], IO[str]]]:
    """The tool on two ranks, as a launcher starts them, and what they say on stderr."""
    # They meet at a store of this process, as at torchrun's: a port that is only chosen here could be taken meanwhile.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command, started = [sys.executable, str(TOOL), *words], []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            for rank in ("0", "1"):
                env = environment(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", **meeting)
                pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
                started.append(subprocess.Popen(command, cwd=REPOSITORY, env=env, **pipes))
            yield started, errors
        finally:
            for one in started:
                one.kill()
                one.wait()


def test_two_ranks_serve_until_a_signal(checkpoints: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--load", checkpoints, "--distributed-backend", "gloo"]
    body = {"prompt": ["1 2 3", "5"], "max_tokens": 8, "temperature": 0}
    with two_ranks(*words, "--port", "0") as (started, errors):
        assert started[0].stdout is not None
        line = started[0].stdout.readline()
        found = re.search(r"tiny is served at http://127\.0\.0\.1:(\d+)", line)
        errors.seek(0)
        assert found, line + errors.read()
        port = int(found[1])
        status, answer = ask(port, body)
        assert (status, ask(port, body)[1]["choices"]) == (200, answer["choices"])
        assert ask(port, {"prompt": "1", "max_tokens": 17})[0] == 400
        ends = []
        for one in started:  # the second may be about to end by what the first one told it
            one.send_signal(signal.SIGTERM)
            ends.append(one.wait(timeout=120))
        errors.seek(0)
        assert ends == [0, 0], errors.read()
    main = runpy.run_path(str(REPOSITORY / "tools" / "generate_text.py"))["main"]
    capfd.readouterr()
    for prompt, one in zip(body["prompt"], answer["choices"], strict=True):
        main([*words, "--prompt", prompt, "--out-seq-length", "8", "--greedy"])
        assert capfd.readouterr().out == f"{prompt}{one['text']}\n"


@contextlib.contextmanager
def handlers_put_back() -> Iterator[dict[signal.Signals, Any]]:
    """Those of the signals that end a server, as they are before the block."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_that_comes_after_the_first_rank_has_told_the_end_is_ignored() -> None:
    ended_by_signals = runpy.run_path(str(TOOL))["ended_by_signals"]
    with handlers_put_back() as before:
        with contextlib.suppress(KeyError), ended_by_signals(None):
            raise KeyError
        assert {number: signal.getsignal(number) for number in before} == before
        with ended_by_signals(None):
            os.kill(os.getpid(), signal.SIGTERM)
        assert {number: signal.getsignal(number) for number in before} == before
        with ended_by_signals(None):
            pass
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN}


def test_mistakes_are_told(
    checkpoints: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = runpy.run_path(str(TOOL))["main"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, sentence in (
            (["--load", checkpoints, "--port", port], f"--host 127.0.0.1 --port {port}: "),
            (["--load", checkpoints, "--port", "70000"], "--port 70000: it must be at least 0 and below 65536"),
            (["--load", checkpoints, "--max-waiting", "0"], "--max-waiting 0: it must be at least 1"),
            (["--load", checkpoints, "--host", ""], "--host: it is empty"),
            (["--load", checkpoints, "--port", "0", "--micro-batch-size", str(10**12)], "enough memory for the keys"),
            (["--load", str(tmp_path), "--port", "0"], "there is no checkpoint"),
            (["--port", "0"], "--load is not given"),
        ):
            with pytest.raises(SystemExit) as caught:
                main([*words, "--distributed-backend", "gloo"])
            assert caught.value.code == 2
            assert sentence in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "megatron.tasks.serving.app", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as caught:
        main(["--load", checkpoints, "--port", "0", "--distributed-backend", "gloo"])
    assert caught.value.code == 2
    assert 'pip install "megatron[serve]"' in capsys.readouterr().err
