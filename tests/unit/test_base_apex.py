"""NVIDIA's apex is told from the package of the same name by its files, and is never trusted blindly."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.base.apex import apex_kind, apex_problems, load_from_apex, refuse_unrelated_apex
from megatron.base.complaints import ConfigError

Install = Callable[[dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package called apex, of the given files and contents, where imports look first."""

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "apex" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
            monkeypatch.delitem(sys.modules, name)

    return write


# As in the wheel apex 0.9.10.dev0 of PyPI, a toolkit for log-ins: it fails when it is imported.
UNRELATED = {
    "__init__.py": "raise ImportError('cannot import name UnencryptedCookieSessionFactoryConfig')",
    "db.py": "",
}
NVIDIA = {"__init__.py": "", "optimizers/__init__.py": "", "optimizers/fused_adam.py": ""}


def right(found: str) -> None:
    return None


def test_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert apex_kind() == "none"
    assert apex_problems() == []
    assert load_from_apex("optimizers", "FusedAdam", right) is None


def test_a_clone_that_is_not_installed_is_none(install: Install) -> None:
    install({"setup.py": "", "apex/__init__.py": ""})
    assert apex_kind() == "none"


def test_the_unrelated_package_is_refused_without_importing_it(install: Install) -> None:
    install(UNRELATED)
    assert apex_kind() == "unrelated"
    for refuse in (refuse_unrelated_apex, lambda: load_from_apex("optimizers", "FusedAdam", right)):
        with pytest.raises(ConfigError) as caught:
            refuse()
        (problem,) = caught.value.problems
        assert "pip uninstall apex" in problem and "https://github.com/NVIDIA/apex" in problem
    assert "apex" not in sys.modules


def test_nvidias_is_loaded(install: Install) -> None:
    install({**NVIDIA, "optimizers/__init__.py": "FusedAdam = 'fused'"})
    assert apex_kind() == "nvidia"
    assert apex_problems() == []
    assert load_from_apex("optimizers", "FusedAdam", right) == "fused"


def wrong(found: str) -> str:
    return f"{found} is off by 3"


def no_kernel(found: str) -> None:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("text", "problem_of", "reason"),
    [
        ("import torch._six", right, "ModuleNotFoundError: No module named 'torch._six'"),
        ("", right, "has no attribute 'FusedAdam'"),
        ("FusedAdam = 'fused'", wrong, "fused is off by 3"),
        ("FusedAdam = 'fused'", no_kernel, "RuntimeError: no kernel image is available"),
    ],
)
def test_nvidias_that_does_not_work_is_warned_of(
    install: Install,
    caplog: pytest.LogCaptureFixture,
    text: str,
    problem_of: Callable[[str], str | None],
    reason: str,
) -> None:
    install({**NVIDIA, "optimizers/__init__.py": text})
    with caplog.at_level(logging.WARNING, "megatron"):
        assert load_from_apex("optimizers", "FusedAdam", problem_of) is None
    assert "apex.optimizers.FusedAdam does not work here" in caplog.text and reason in caplog.text
