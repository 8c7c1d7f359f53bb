"""Proves from pytest's report that every test file ran: `python -m tests.check_all_ran REPORT`."""

import dataclasses
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

# How the fixture `shared` begins the sentence with which it skips.
SHARED_ABSENT = "the reference data of this test is not on this machine"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One test as pytest reported it; `module` is its dotted module, followed by its class if it has one."""

    module: str
    name: str
    state: str  # passed, failed or skipped
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the report says about all test files."""

    complaints: list[str]
    not_shown: list[str]


def read_report(path: Path) -> list[Outcome]:
    """The tests in a JUnit report that pytest wrote."""
    return [_outcome(case) for case in ElementTree.parse(path).iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    module, name = case.get("classname", ""), case.get("name", "")
    # A file that skips or breaks as a whole is reported as a test with the file's name and no class.
    module = module or name
    if case.find("failure") is not None or case.find("error") is not None:
        return Outcome(module, name, "failed")
    skipped = case.find("skipped")
    if skipped is not None:
        return Outcome(module, name, "skipped", skipped.get("message", ""))
    return Outcome(module, name, "passed")


def module_name(path: str) -> str:
    """`tests/unit/test_x.py` -> `tests.unit.test_x`."""
    return path.removesuffix(".py").replace("/", ".")


def judge(files: Iterable[str], outcomes: Iterable[Outcome]) -> Verdict:
    """Hold the report against the list of test files (paths from the repository's root).

    A complaint: a file with no test in the report, or with none that passed. Only two reasons excuse that, and are
    listed as not shown: every test skipped, in `tests/gpu/`, or for want of the shared reference data.
    """
    verdict = Verdict([], [])
    outcomes = list(outcomes)
    for path in sorted(files):
        module = module_name(path)
        mine = [o for o in outcomes if o.module == module or o.module.startswith(module + ".")]
        if not mine:
            verdict.complaints.append(f"{path}: no test of it is in the report")
        elif any(outcome.state == "passed" for outcome in mine):
            continue
        elif _excused(path, mine):
            verdict.not_shown.append(f"{path}: {mine[0].reason}")
        else:
            verdict.complaints.append(f"{path}: none of its {len(mine)} tests passed")
    return verdict


def _excused(path: str, outcomes: list[Outcome]) -> bool:
    if any(outcome.state != "skipped" for outcome in outcomes):
        return False
    return path.startswith("tests/gpu/") or all(SHARED_ABSENT in outcome.reason for outcome in outcomes)


def main(report: Path, root: Path) -> int:
    """Print the verdict; 0 where every test file ran."""
    if not report.is_file():
        print(f"{report}: pytest left no report, so nothing shows that the tests ran", file=sys.stderr)
        return 1
    outcomes = read_report(report)
    files = [str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")]
    verdict = judge(files, outcomes)
    skipped = Counter((outcome.module, outcome.reason) for outcome in outcomes if outcome.state == "skipped")
    for (module, reason), count in skipped.items():
        print(f"skipped: {count} in {module}: {reason}")
    for line in verdict.not_shown:
        print(f"NOT SHOWN: {line}")
    for line in verdict.complaints:
        print(f"DID NOT RUN: {line}", file=sys.stderr)
    shown = len(files) - len(verdict.not_shown) - len(verdict.complaints)
    print(f"{shown} of {len(files)} test files ran, {len(verdict.not_shown)} not shown")
    return 1 if verdict.complaints else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(__file__).resolve().parent.parent))
