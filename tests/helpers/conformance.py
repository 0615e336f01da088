"""The conformance table: written from the tests that ran, so that it says nothing that was not just checked.

A test carries `@pytest.mark.conformance(area, what, outcome)`, an outcome being "works", "guarded" (left out of
recomputation and named in one line) or "refused" (a clear error). A row holds the worst of its tests: it is in the
table only if every one of them passed. `pytest --conformance` writes `docs/conformance.md`; every whole run compares.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).parents[2] / "docs" / "conformance.md"
OUTCOMES = {
    "works": "results bit-equal to the plain run, memory planned",
    "guarded": "results bit-equal; what cannot be recomputed is left out and named in one line",
    "refused": "a clear error or warning says what to change, before anything is lost",
}
HEAD = """# Conformance

Written by `python -m pytest --conformance` from the tests that passed; a test run fails if this table is not what it
would write. {counts}

{legend}
"""


class Conformance:
    """Collects the rows of one run (a pytest plugin)."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: dict[tuple[str, str], list[tuple[str, bool, str]]] = {}
        option = config.option
        self._differs = False
        self._whole = not (option.keyword or option.markexpr or option.deselect or getattr(option, "lf", False))

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """A run of some tests knows nothing of the others."""
        self._whole = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Give the marker to the report, which xdist's workers send to the process that collects them."""
        report = yield
        report.conformance = [list(marker.args) for marker in item.iter_markers("conformance")]
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a test with the marker ended."""
        for area, what, outcome in getattr(report, "conformance", ()):  # a crashed worker's report has none
            if outcome not in OUTCOMES:
                raise ValueError(f"{report.nodeid}: the outcome {outcome!r} is none of {', '.join(OUTCOMES)}")
            if report.when == "call" or not report.passed:
                where = report.nodeid.partition("[")[0]
                self._rows.setdefault((area, what), []).append((outcome, report.passed, where))

    def text(self) -> str:
        """The table."""
        areas: dict[str, list[str]] = {}
        counts = dict.fromkeys(OUTCOMES, 0)
        for (area, what), tests in sorted(self._rows.items()):
            if all(passed for _, passed, _ in tests):
                outcome = max((outcome for outcome, _, _ in tests), key=list(OUTCOMES).index)
                counts[outcome] += 1
                where = ", ".join(f"`{name}`" for name in sorted({name for _, _, name in tests}))
                areas.setdefault(area, []).append(f"| {what} | **{outcome}** | {where} |")
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        legend = "\n".join(f"- **{outcome}**: {meaning}." for outcome, meaning in OUTCOMES.items())
        parts = [HEAD.format(counts=f"Rows: {told}.", legend=legend)]
        for area, rows in areas.items():
            parts.append("\n".join([f"## {area}", "", "| what | outcome | test |", "|---|---|---|", *rows]) + "\n")
        return "\n".join(parts)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the table, or compare it."""
        if hasattr(self._config, "workerinput"):
            return  # one of several processes, which knows only its own tests
        if self._config.getoption("--conformance"):
            TABLE.write_text(self.text())
        elif self._compares(session) and (not TABLE.exists() or TABLE.read_text() != self.text()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            self._differs = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        """Say it below everything else: the line of counts says only that every test passed."""
        yield
        if self._differs:
            terminalreporter.section("FAILED", red=True)
            told = "docs/conformance.md is not what these tests say: run `python -m pytest --conformance`."
            terminalreporter.write_line(told, red=True)

    def _compares(self, session: pytest.Session) -> bool:
        every = self._whole and self._config.args_source == pytest.Config.ArgsSource.TESTPATHS
        return every and session.exitstatus == pytest.ExitCode.OK
