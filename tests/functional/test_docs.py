"""What the documents say of flags and bytes is so."""

import re
import runpy
import shlex
import sys

import pytest

from megatron.base.formulas import gpt_parameters
from megatron.optimizer.precision import PrecisionConfig
from megatron.pipeline import bubble, peak_in_flight, show
from tests.harness.launch import REPOSITORY, run_command

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TOOLS = (
    "preprocess_data",
    "train_tokenizer",
    "build_index",
    "check_layout",
    "convert_checkpoint",
    "inspect_checkpoint",
    "ensemble_race",
    "generate_text",
    "serve",
)
MODULES = ("tasks/main", "tasks/harness", "pipeline/show")
ENTRIES = ["pretrain_gpt.py", "pretrain_bert.py", *(f"megatron/{name}.py" for name in MODULES)]
PROGRAMS = [*ENTRIES, *(f"tools/{name}.py" for name in TOOLS)]
ZERO_SHOT = ("WIKITEXT103", "LAMBADA")  # whose flags are not those of the other tasks
OTHERS = {"--nproc-per-node", "--prompt"}  # of torchrun, and of tools that are not asked


def command(document: str, program: str) -> list[str]:
    """The arguments that a document gives to `program` in its (first) command."""
    blocks = re.findall(r"```bash\n(.*?)```", (REPOSITORY / document).read_text(encoding="utf-8"), re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in "\n".join(blocks).replace("\\\n", " ").splitlines()]
    words = next(words for words in lines if program in words)
    return words[words.index(program) + 1 :]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def test_flags_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = set(OTHERS)
    asked = [(program, ["--help"]) for program in PROGRAMS]
    for program, words in [*asked, *(("megatron/tasks/main.py", ["--task", task, "--help"]) for task in ZERO_SHOT)]:
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(REPOSITORY / program))["main"](words)
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


@pytest.mark.parametrize("document", ["README.md", "docs/pipelines.md"])
def test_the_schedule_is_drawn(capsys: pytest.CaptureFixture[str], document: str) -> None:
    show.main(command(document, "megatron.pipeline.show"))
    assert capsys.readouterr().out.startswith("interleaved 1F1B, 4 ranks of 2 chunks, 8 micro-batches")


def test_the_planned_layout_is_the_one_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(REPOSITORY / "tools/check_layout.py"))["main"]
    assert main(command("docs/pipelines.md", "tools/check_layout.py")) == 0
    assert capsys.readouterr().out.startswith("rank 1500 of 3072: tensor rank 4 of 8, pipeline rank 31 of 64")
    assert f"{gpt_parameters(128, 25_600, 51_200, 2048) / 1e12:.3f}e12" in DOCUMENTS[-1].read_text(encoding="utf-8")


def test_a_pipeline_s_closed_forms_are_those_of_the_code() -> None:
    text = (REPOSITORY / "docs/pipelines.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.count("`(p - 1)/")]
    assert len(rows) == 3
    for name, v, (*_, idle, held) in zip(("gpipe", "1f1b", "1f1b"), (1, 1, 3), rows, strict=True):
        formulas = [re.findall("`(.*?)`", cell)[0] for cell in (idle, held)]
        for p, m, r in ((4, 8, 0), (4, 8, 3), (8, 8, 2)):
            known = {"p": p, "m": m, "v": v, "r": r, "min": min}
            code = [re.sub(r"([\w)]) (?=[\w(])", r"\1 * ", formula) for formula in formulas]
            values = [eval(words, {}, known) for words in code]
            assert values == [bubble(p, v, m), peak_in_flight(name, p, v, m, r)]


def test_flags_of_a_launch_script_reach_the_check() -> None:
    """The line of docs/pipelines.md as it stands, and those of the launch scripts, where nothing is set."""
    text = (REPOSITORY / "docs/pipelines.md").read_text(encoding="utf-8")
    line = next(block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "DRY_RUN" in block)
    done = run_command(["bash", "-euo", "pipefail", "-c", line])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0 of 1024: tensor rank 0 of 8, pipeline rank 0 of 16, data rank 0 of 8\n")
    assert "192 micro-batches" in done.stdout
    for size in ("8.3B", "175B"):
        script = (REPOSITORY / f"examples/pretrain_gpt_{size}.sh").read_text(encoding="utf-8")
        piped = re.findall(r"^#   DRY_RUN=1 (.*\|)\n#     (xargs .*)$", script, re.M)
        expected = line.replace("175B", size).replace(" --dry-run", "").split()[1:]
        assert " ".join(piped[0]).split() == [word if word != "1024" or size == "175B" else "512" for word in expected]


@pytest.mark.slow
def test_the_checked_layout_is_equal() -> None:
    words = [*command("README.md", "tools/check_layout.py"), "--max-ranks", "4", "--steps", "1", "--float64"]
    done = run_command([sys.executable, "tools/check_layout.py", *words])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "asked for: tensor 4 x pipeline 4 (of 2 virtual stages each) x data 4 = 64 ranks, 16 micro" in done.stdout
    assert "\nEQUAL: in float64" in done.stdout


def test_commands_on_checkpoints_are_ones_that_the_tools_take() -> None:
    """All that is wrong with them here is that what they read is not there."""
    text = (REPOSITORY / "docs/checkpoints.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [shlex.split(line) for line in "\n".join(blocks).replace("\\\n", " ").splitlines() if line]
    assert [words[1] for words in lines] == ["tools/inspect_checkpoint.py", *["tools/convert_checkpoint.py"] * 3]
    for words in lines:
        read = f"--load {words[words.index('--load') + 1]}" if "--load" in words else words[2]
        done = run_command(words)
        assert (done.returncode, done.stderr) == (2, f"error: {read}: there is no such folder\n")


def test_commands_on_bert_are_ones_that_the_tools_take() -> None:
    """As above."""
    text = (REPOSITORY / "docs/bert.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in "\n".join(blocks).replace("\\\n", " ").splitlines()]
    commands = [words for words in lines if words]
    tools = ("preprocess_data", "convert_checkpoint", "ensemble_race")
    assert [words[1] for words in commands] == [f"tools/{name}.py" for name in tools]
    for words in commands:
        done = run_command(words)
        told = done.stderr.splitlines()
        assert done.returncode == 2 and told, words
        assert all(
            re.fullmatch(r"error: .*(there is no such (file|folder)|.*: No such file or directory)", t) for t in told
        )
