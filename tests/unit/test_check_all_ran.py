"""The proof that every test file ran must itself be able to fail."""

from pathlib import Path

import pytest

from tests.check_all_ran import SHARED_ABSENT, Outcome, judge, main, module_name, read_report

FILE = "tests/unit/test_x.py"
GPU_FILE = "tests/gpu/test_y.py"


def outcome(state: str, reason: str = "", path: str = FILE) -> Outcome:
    return Outcome(module_name(path), "test_it", state, reason)


def test_a_file_with_a_passed_test_ran() -> None:
    verdict = judge([FILE], [outcome("passed"), outcome("skipped", "whatever"), outcome("failed")])
    assert (verdict.complaints, verdict.not_shown) == ([], [])


def test_tests_in_a_class_count_and_files_with_a_longer_name_do_not() -> None:
    in_class = Outcome("tests.unit.test_x.TestThing", "test_it", "passed")
    longer = Outcome("tests.unit.test_xy", "test_it", "passed")
    assert judge([FILE], [in_class]).complaints == []
    assert judge([FILE], [longer]).complaints == [f"{FILE}: no test of it is in the report"]


@pytest.mark.parametrize(
    "outcomes",
    [
        [],
        [outcome("failed")],
        [outcome("skipped", "some module is absent")],
        [outcome("skipped", f"{SHARED_ABSENT}: ..."), outcome("skipped", "some module is absent")],
        [outcome("skipped", f"{SHARED_ABSENT}: ..."), outcome("failed")],
    ],
)
def test_a_file_that_shows_nothing_is_a_complaint(outcomes: list[Outcome]) -> None:
    verdict = judge([FILE], outcomes)
    assert len(verdict.complaints) == 1
    assert verdict.complaints[0].startswith(FILE)
    assert verdict.not_shown == []


def test_a_file_without_its_data_is_listed() -> None:
    verdict = judge([FILE], [outcome("skipped", f"{SHARED_ABSENT}: there is no folder")])
    assert verdict.complaints == []
    assert verdict.not_shown == [f"{FILE}: {SHARED_ABSENT}: there is no folder"]


def test_a_gpu_file_may_be_skipped_but_not_fail_or_be_absent() -> None:
    assert judge([GPU_FILE], [outcome("skipped", "no GPU", GPU_FILE)]).not_shown == [f"{GPU_FILE}: no GPU"]
    assert len(judge([GPU_FILE], [outcome("failed", "", GPU_FILE)]).complaints) == 1
    assert len(judge([GPU_FILE], []).complaints) == 1


REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" errors="1" failures="1" skipped="2" tests="5">
<testcase classname="tests.unit.test_a" name="test_good" time="0.1" />
<testcase classname="tests.unit.test_a" name="test_bad"><failure message="no">trace</failure></testcase>
<testcase classname="tests.unit.test_a" name="test_left"><skipped type="pytest.skip" message="why" /></testcase>
<testcase classname="" name="tests.unit.test_b"><error message="collection failure">ImportError</error></testcase>
<testcase classname="" name="tests.gpu.test_c"><skipped type="pytest.skip" message="no GPU">x</skipped></testcase>
</testsuite></testsuites>
"""


def test_a_report_of_pytest_is_read(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    assert read_report(report) == [
        Outcome("tests.unit.test_a", "test_good", "passed"),
        Outcome("tests.unit.test_a", "test_bad", "failed"),
        Outcome("tests.unit.test_a", "test_left", "skipped", "why"),
        Outcome("tests.unit.test_b", "tests.unit.test_b", "failed"),
        Outcome("tests.gpu.test_c", "tests.gpu.test_c", "skipped", "no GPU"),
    ]


def test_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.xml"
    assert main(report, tmp_path) == 1
    report.write_text(REPORT, encoding="utf-8")
    for name in ("unit/test_a.py", "gpu/test_c.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True)
        (tmp_path / "tests" / name).touch()
    assert main(report, tmp_path) == 0
    (tmp_path / "tests/unit/test_b.py").touch()
    assert main(report, tmp_path) == 1
    told = capsys.readouterr()
    assert "NOT SHOWN: tests/gpu/test_c.py: no GPU" in told.out
    assert "DID NOT RUN: tests/unit/test_b.py" in told.err
