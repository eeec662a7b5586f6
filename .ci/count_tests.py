"""Print what each JUnit report counts, then the sum as 'N passed, N failed'.

Usage: count_tests.py FOLDER SUITE...  A suite that left no report (it crashed, or never ran)
counts as one failure, so that the last line cannot look better than the run was.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree as ET


def count(report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of one report."""
    if not report.is_file():
        return 0, 1, 0
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ET.parse(report).iter("testsuite"):
        for key in totals:
            totals[key] += int(suite.get(key, 0))
    failed = totals["failures"] + totals["errors"]
    return totals["tests"] - failed - totals["skipped"], failed, totals["skipped"]


def main(folder: Path, suites: list[str]) -> int:
    """Print one line per suite and the sum; 1 when anything failed or nothing passed."""
    passed = failed = 0
    for name in suites:
        report = folder / f"{name}.xml"
        suite_passed, suite_failed, skipped = count(report)
        note = "" if report.is_file() else " (no report: the suite did not finish)"
        print(f"{name}: {suite_passed} passed, {suite_failed} failed, {skipped} skipped{note}")
        passed += suite_passed
        failed += suite_failed
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
