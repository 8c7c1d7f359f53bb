"""tools/setup_environment.sh, with a stand-in Python: which environment it takes, what it installs, and only once."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Answers as a Python does to what the script asks: its version, whether PyTorch imports (the program on standard
# input), its folders; makes a `.venv` with itself in it; notes what pip is asked to do.
STAND_IN = """#!/bin/bash
case "$*" in
  --version) echo "Python $VERSION" ;;
  "-c import sys; sys.exit"*) [ "$VERSION" != 3.9.2 ] ;;
  "- "*) [ -n "$HAS_TORCH" ] && echo "$0" ;;
  *purelib*) echo "$PACKAGES" ;;
  *sys.prefix*) echo "this environment" ;;
  "-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" && [ -z "$VENV_FAILS" ] ;;
  "-m pip --version") ;;
  "-m pip install"*) echo "$*" >>"$LOG"; [ -z "$PIP_FAILS" ] ;;
  *) echo "not expected: $*" >&2; exit 9 ;;
esac
"""


class Machine:
    """A copy of the script in a repository of its own, and a PATH with a stand-in Python."""

    def __init__(self, folder: Path) -> None:
        self.root, self.binaries, self.log = folder / "repository", folder / "bin", folder / "pip.log"
        (self.root / "tools").mkdir(parents=True)
        for name in ("tools/setup_environment.sh", "setup.py", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.binaries.mkdir()
        for tool in ("bash", "cat", "cksum", "cp", "dirname", "head", "mkdir"):
            (self.binaries / tool).symlink_to(str(shutil.which(tool)))
        (self.binaries / "python3").write_text(STAND_IN)
        (self.binaries / "python3").chmod(0o755)
        (folder / "packages").mkdir()
        self.environment = {"PATH": str(self.binaries), "LOG": str(self.log), "VERSION": "3.12.1"}
        self.environment["PACKAGES"] = str(folder / "packages")

    def set_up(self, extras: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Source the script as others do, with arguments of the caller's own that it must not take for its own."""
        program = (
            f"set -euo pipefail; setup_extras={extras}; source {self.root}/tools/setup_environment.sh; echo ready $1"
        )
        command = [str(self.binaries / "bash"), "-c", program, "caller", "argument"]
        return subprocess.run(command, env=self.environment | environment, capture_output=True, text=True, check=False)

    def installs(self) -> list[str]:
        """What pip was asked for so far, without the options that are always there."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix("-m pip install --disable-pip-version-check --no-input ") for line in lines]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_torch_a_venv_is_made_with_the_tested_versions(machine: Machine) -> None:
    done = machine.set_up("test")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ready argument\n"
    assert machine.installs() == [f"-c {machine.root}/constraints.txt -e {machine.root}[test]"]
    assert (machine.root / ".venv/bin/python").exists()


def test_an_environment_with_torch_is_used_and_its_torch_stays(machine: Machine) -> None:
    (machine.binaries / "python").symlink_to(machine.binaries / "python3")
    done = machine.set_up(HAS_TORCH="yes")
    assert done.returncode == 0, done.stderr
    assert machine.installs() == [f"-e {machine.root}"]
    assert not (machine.root / ".venv").exists()


def test_the_second_time_nothing_is_installed_until_something_else_is_asked_for(machine: Machine) -> None:
    for extras in ("", "", "test", "test", ""):
        assert machine.set_up(extras).returncode == 0
    assert [line.split(" -e ")[1] for line in machine.installs()] == [f"{machine.root}", f"{machine.root}[test]"]
    with (machine.root / "constraints.txt").open("a") as constraints:
        constraints.write("another==1\n")
    assert machine.set_up("").returncode == 0
    assert len(machine.installs()) == 3


def test_after_a_failure_it_is_tried_again(machine: Machine) -> None:
    failed = machine.set_up(PIP_FAILS="yes")
    assert failed.returncode != 0
    assert "pip could not install what is needed" in failed.stderr
    assert "ready" not in failed.stdout
    assert machine.set_up().returncode == 0
    assert len(machine.installs()) == 2


def test_a_python_that_is_too_old_is_told_so(machine: Machine) -> None:
    done = machine.set_up(VERSION="3.9.2")
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed; python3 here is Python 3.9.2" in done.stderr
    assert not (machine.root / ".venv").exists()


def test_a_missing_venv_module_is_told(machine: Machine) -> None:
    done = machine.set_up(VENV_FAILS="yes")
    assert done.returncode != 0
    assert "python3-venv" in done.stderr
