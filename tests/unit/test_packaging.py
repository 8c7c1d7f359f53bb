"""Packaging: constraints.txt pins all that is needed, shell scripts parse, the licence is there."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Not pinned: the tool that installs, this package, and what PyTorch brings along where it is built for GPUs.
FREE = re.compile(r"pip|megatron|triton|nvidia-.*|cuda-.*")


def normalised(name: str) -> str:
    """A distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """The versions in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalised(name): version for name, version in pinned}


def test_every_line_of_the_constraints_is_a_pin_without_a_build() -> None:
    assert pins()["torch"] == "2.13.0"
    assert all(re.fullmatch(r"[0-9a-z.]+", version) for version in pins().values())


def test_everything_that_setup_py_asks_for_is_pinned() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    lists = re.findall(r"(?:install_requires=|\"test\": )\[(.*?)\]", text, re.DOTALL)
    assert len(lists) == 2
    asked = re.findall(r'"([A-Za-z0-9_.-]+)', "".join(lists))
    assert len(asked) > 10
    assert [name for name in asked if normalised(name) not in pins()] == []


@pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="only .venv is made with the versions of constraints.txt"
)
def test_the_environment_is_what_the_constraints_say() -> None:
    installed = {normalised(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    here = {name: version.split("+")[0] for name, version in installed.items() if not FREE.fullmatch(name)}
    assert here == {name: version for name, version in pins().items() if name in here}


def test_shell_scripts_parse() -> None:
    folders = ("tools", "tests", "examples", ".ci")
    scripts = [path for folder in folders for path in (ROOT / folder).rglob("*.sh")] + [ROOT / ".ci/run"]
    assert len(scripts) >= 4
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
