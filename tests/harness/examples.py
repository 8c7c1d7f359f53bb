"""Starts the scripts of examples/ as a user does, with only those of their variables set that a test gives."""

import shlex
import subprocess

from tests.harness.launch import environment, run_command

DATA = {"DATA_PATH": "/data/a_text_document", "VOCAB_FILE": "/data/vocab.json", "MERGE_FILE": "/data/merges.txt"}
_VARIABLES = {*DATA, "SAVE", "NODE_RANK", "NNODES", "RACE", "PRETRAINED", "SEEDS", "ENCODER"}


def start(script: str, *flags: str, timeout: float = 240.0, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run `script` with only those of its variables set that are given."""
    return _run([script, *flags], variables, timeout)


def _run(words: list[str], variables: dict[str, str], timeout: float) -> "subprocess.CompletedProcess[str]":
    bare = {name: value for name, value in environment().items() if name not in _VARIABLES}
    return run_command(["bash", *words], env=bare | variables, timeout=timeout)


def dry_run(script: str, *flags: str, **variables: str) -> list[str]:
    """The words of the command that `script` would run."""
    done = _run([script, *flags], {"DRY_RUN": "1", "SAVE": "/data/run"} | DATA | variables, 60.0)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    return words[words.index("torchrun") :]


def rounded(value: float, like: str) -> str:
    """`value` with as many places as `like` has."""
    return f"{value:.{len(like.partition('.')[2])}f}"
