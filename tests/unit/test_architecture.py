"""The rules of the house hold in the whole repository, and each of them is able to fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import architecture as rules
from tests.harness.architecture import Source, all_problems, imports_of, read_sources

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = read_sources(ROOT, "megatron/**/*.py")
EDGE = read_sources(ROOT, "*.py", "tools/**/*.py", "examples/**/*.py")
TESTS = read_sources(ROOT, "tests/**/*.py")

# Files under megatron/ that must name CUDA, and why.
CUDA_FILES = {
    "megatron/mpu/__init__.py": "exports Megatron-LM's CUDA-named functions as aliases",
    "megatron/mpu/random.py": "generators of both kinds of device, and Megatron-LM's CUDA-named aliases",
    "megatron/training/setup.py": "chooses the device of a rank",
    "megatron/training/throughput.py": "asks the device for its name and its memory",
}


def installed() -> list[str]:
    """The packages that setup.py installs, without their versions."""
    block = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return re.findall(r'"([A-Za-z0-9_-]+)', block[1])


def a_file(path: str, *lines: str) -> Source:
    return Source(path, "\n".join(lines))


# --- the repository ---------------------------------------------------------------------------------------------------


def test_there_is_something_to_check() -> None:
    assert {source.room for source in PACKAGE} >= {"base", "mpu", "tokenizer", "data", "model", "training"}
    assert any(source.path == "pretrain_gpt.py" for source in EDGE)
    assert len(installed()) >= 5


def test_imports_point_down() -> None:
    assert all_problems(PACKAGE, rules.floor_problems) == []


def test_rooms_need_no_more_packages_than_they_may() -> None:
    assert all_problems(PACKAGE, rules.package_problems) == []


def test_what_is_imported_is_installed_and_the_other_way_round() -> None:
    declared = [*installed(), "setuptools"]
    assert all_problems(PACKAGE + EDGE, lambda source: rules.undeclared_problems(source, declared)) == []
    assert rules.unused_problems(PACKAGE + EDGE, installed()) == []


def test_an_optional_package_is_tried_in_one_file() -> None:
    assert rules.optional_problems(PACKAGE + EDGE) == []


def test_command_lines_are_read_at_the_edge() -> None:
    assert all_problems(PACKAGE, rules.argparse_problems) == []


def test_files_begin_by_saying_what_lives_in_them() -> None:
    assert all_problems(PACKAGE + EDGE + TESTS, rules.docstring_problems) == []


def test_cuda_is_named_only_where_it_must_be() -> None:
    assert all_problems(PACKAGE + EDGE, lambda source: rules.cuda_problems(source, CUDA_FILES)) == []


def test_the_list_of_files_that_name_cuda_is_no_longer_than_needed() -> None:
    named = {source.path for source in PACKAGE if rules.cuda_problems(source, {})}
    assert named == set(CUDA_FILES)


def test_nothing_that_is_loaded_can_run_code() -> None:
    assert all_problems(PACKAGE + EDGE, rules.unpickling_problems) == []


def test_nothing_is_left_over_from_writing() -> None:
    texts = {source.path: source.text for source in PACKAGE + EDGE + TESTS}
    for pattern in ("*.md", "*.txt", "*.toml", "**/*.sh", "docs/**/*.md", ".ci/run"):
        for path in ROOT.glob(pattern):
            if not any(part in (".venv", "quickstart", "test-results") for part in path.relative_to(ROOT).parts[:-1]):
                texts[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    assert [problem for path, text in texts.items() for problem in rules.left_over_problems(path, text)] == []


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh process has loaded after `statement`."""
    program = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_mpu_loads_no_other_room() -> None:
    ours = {name for name in loaded_by("import megatron.mpu") if name.split(".")[0] == "megatron"}
    assert {"megatron", "megatron.mpu"} <= ours
    assert not {name for name in ours - {"megatron"} if not f"{name}.".startswith("megatron.mpu.")}


def test_the_tokenizer_and_the_ground_floor_load_no_torch() -> None:
    modules = [source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for source in PACKAGE]
    light = [name for name in modules if name.split(".")[1:2] in (["base"], ["tokenizer"])]
    loaded = loaded_by("import " + ", ".join(light))
    assert set(light) <= loaded
    assert "torch" not in loaded


def test_the_package_itself_is_empty() -> None:
    assert {name for name in loaded_by("import megatron") if name.split(".")[0] == "megatron"} == {"megatron"}


# --- the rules can fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import megatron.mpu.layers as layers", "megatron.mpu.layers"),
        ("from megatron.mpu import layers", "megatron.mpu"),
        ("from megatron import mpu", "megatron.mpu"),
        ("from ..mpu import layers", "megatron.mpu"),
        ("from .. import mpu", "megatron.mpu"),
        ("def f():\n    if x:\n        from megatron.mpu import layers", "megatron.mpu"),
        ("if TYPE_CHECKING:\n    import megatron.mpu", "megatron.mpu"),
        ("import importlib\nimportlib.import_module('megatron.mpu')", "megatron.mpu"),
        ("__import__('megatron.mpu')", "megatron.mpu"),
    ],
)
def test_every_way_to_import_is_seen(line: str, module: str) -> None:
    source = a_file("megatron/base/x.py", line)
    assert module in [imported.module for imported in imports_of(source)]
    assert len(rules.floor_problems(source)) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("megatron/model/x.py", "import megatron.optimizer"),  # the same floor
        ("megatron/data/x.py", "import megatron.tokenizer"),
        ("megatron/checkpointing/x.py", "import megatron.training"),  # upwards
        ("megatron/mpu/x.py", "import megatron.base"),  # mpu stands alone
        ("megatron/base/x.py", "import megatron.planner"),
        ("megatron/training/x.py", "import pretrain_gpt"),
        ("megatron/training/x.py", "from tools import preprocess_data"),
        ("megatron/attic/x.py", "import megatron.base"),  # a room without a floor
        ("megatron/training/x.py", "import megatron.attic"),
        ("megatron/__init__.py", "import megatron.base"),
        ("megatron/utils.py", "import megatron.base"),
    ],
)
def test_imports_that_do_not_point_down_are_found(path: str, line: str) -> None:
    assert len(rules.floor_problems(a_file(path, line))) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("megatron/model/x.py", "import megatron.mpu"),
        ("megatron/model/x.py", "from . import gpt"),
        ("megatron/training/x.py", "from megatron.base.files import atomic_write"),
        ("tools/x.py", "import megatron.training"),
        ("megatron/mpu/x.py", "from megatron.mpu.utils import divide"),
    ],
)
def test_imports_that_point_down_pass(path: str, line: str) -> None:
    assert rules.floor_problems(a_file(path, line)) == []


def test_packages_that_a_room_may_not_need_are_found() -> None:
    assert len(rules.package_problems(a_file("megatron/base/x.py", "import os, numpy"))) == 1
    assert len(rules.package_problems(a_file("megatron/mpu/x.py", "import torch", "import numpy as np"))) == 1
    assert len(rules.package_problems(a_file("megatron/tokenizer/x.py", "import tokenizers", "import torch.nn"))) == 1
    assert rules.package_problems(a_file("megatron/mpu/x.py", "import torch.nn.functional as F, math")) == []
    assert rules.package_problems(a_file("megatron/data/x.py", "import torch, numpy")) == []


def test_undeclared_and_unused_packages_are_found() -> None:
    source = a_file("tools/x.py", "import yaml, scipy", "from torch.utils.tensorboard import SummaryWriter")
    assert len(rules.undeclared_problems(source, ["PyYAML", "torch"])) == 1
    assert rules.undeclared_problems(source, ["pyyaml", "torch", "scipy"]) == []
    assert len(rules.unused_problems([source], ["pyyaml", "torch", "scipy", "tensorboard", "regex"])) == 1


def test_a_package_tried_in_two_places_is_found() -> None:
    tried = ("try:", "    import wandb", "except ImportError:", "    wandb = None")
    one, other = (
        a_file("megatron/training/a.py", *tried),
        a_file("megatron/training/b.py", "def f():", "    import wandb"),
    )
    assert rules.optional_problems([one]) == []
    assert len(rules.optional_problems([one, other])) == 1
    assert rules.optional_problems([a_file("a.py", "import numpy"), a_file("b.py", "import numpy")]) == []


def test_argparse_inside_is_found() -> None:
    inside = a_file("megatron/data/x.py", "def f():", "    from argparse import Namespace")
    assert len(rules.argparse_problems(inside)) == 1
    assert rules.argparse_problems(a_file("megatron/training/arguments.py", "import argparse")) == []
    assert rules.argparse_problems(a_file("tools/x.py", "import argparse")) == []
    guard = 'if __name__ == "__main__":'
    assert rules.argparse_problems(a_file("megatron/data/x.py", "import argparse", guard, "    pass")) == []


def test_files_without_a_docstring_are_found() -> None:
    assert len(rules.docstring_problems(a_file("x.py", "import os", '"""Late."""'))) == 1
    assert len(rules.docstring_problems(a_file("x.py", ""))) == 1
    assert len(rules.docstring_problems(a_file("x.py", '"""A sentence that goes on', 'and on."""'))) == 1
    assert rules.docstring_problems(a_file("x.py", "#!/usr/bin/env python3", '"""What lives here."""')) == []


@pytest.mark.parametrize(
    "line",
    [
        "x.cuda()",
        "torch.cuda.synchronize()",
        'x.to("cuda:0")',
        "from torch import cuda",
        "def f(use_cuda): ...",
        "CUDA = 1",
    ],
)
def test_cuda_in_code_is_found(line: str) -> None:
    source = a_file("megatron/model/x.py", '"""Runs without CUDA."""', "# no cuda here", line)
    assert rules.cuda_problems(source, {}) != []
    assert rules.cuda_problems(source, {"megatron/model/x.py": "because"}) == []


def test_cuda_in_prose_passes() -> None:
    prose = a_file("megatron/model/x.py", '"""Runs without CUDA."""', "def f():", '    """Not on cuda."""  # cuda')
    assert rules.cuda_problems(prose, {}) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "from torch import load",
        "read = torch.load",
        "numpy.load(path, allow_pickle=True)",
        "numpy.load(path, allow_pickle=flag)",
        "import shelve",
    ],
)
def test_unpickling_is_found(line: str) -> None:
    assert rules.unpickling_problems(a_file("megatron/checkpointing/x.py", line)) != []


def test_loading_plain_data_passes() -> None:
    fine = a_file("megatron/checkpointing/x.py", "json.load(f)", "numpy.load(path, allow_pickle=False)")
    assert rules.unpickling_problems(fine) == []


def test_what_is_left_over_is_found() -> None:
    for folder in rules.MACHINE_FOLDERS:
        assert len(rules.left_over_problems("README.md", f"cd /{folder}/x")) == 1
        assert rules.left_over_problems("x.py", f"path/{folder}/x and ./{folder}/x and $HOME/{folder}/x") == []
    assert len(rules.left_over_problems("x.py", "x = 1  # TO" + "DO: later")) == 1
