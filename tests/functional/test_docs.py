"""What the documents say of flags and bytes is so."""

import re
import runpy

import pytest

from megatron.optimizer.precision import PrecisionConfig
from tests.harness.launch import REPOSITORY

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PROGRAMS = ["pretrain_gpt.py", "tools/preprocess_data.py", "tools/train_tokenizer.py", "tools/build_index.py"]
OTHERS = {"--nproc-per-node", "--prompt", "--world-size"}  # of torchrun, and of tools that are not asked


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def test_flags_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = set(OTHERS)
    for program in PROGRAMS:
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(REPOSITORY / program))["main"](["--help"])
        known |= flags_in(capsys.readouterr().out)
    for document in DOCUMENTS:
        named = flags_in(document.read_text(encoding="utf-8"))
        assert len(named) > 5
        assert named <= known, (document.name, sorted(named - known))


def test_bytes_of_a_parameter_are_those_of_its_number_formats() -> None:
    text = (REPOSITORY / "docs" / "memory_and_speed.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (none|`--\S.*?`) \| (\d) \| (\d) \| (\d|-) \| 8 \| (\d+) \| (\d+) \+ (\d+)/d \|$", text, re.M
    )
    assert len(rows) == 4
    for flags, *cells in rows:
        weight, gradient, master, together, kept, shared = (0 if cell == "-" else int(cell) for cell in cells)
        names = [flag.removeprefix("--").replace("-", "_") for flag in flags.strip("`").split()]
        precision = PrecisionConfig(**{name: True for name in names if name != "none"})
        assert (weight, gradient) == (precision.dtype.itemsize, precision.gradient_dtype.itemsize)
        assert master == (precision.main_dtype.itemsize if precision.is_mixed else 0)
        assert together == kept + shared == weight + gradient + master + 8
        assert shared == master + 8
