"""Where CI=true a test that is skipped has failed, unless it is listed here: a skip that nobody reads says that
something was tested which was not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# How a test's id begins: why a machine of CI may be without what it needs.
PERMITTED = {
    "tests/python/packaging_test.py::test_pip_install": "without ccache it compiles everything a second time",
    "tests/launch/slurm_test.py": "Slurm's packages are missing: slurmctld, slurmd, slurm-client, munge",
    "tests/launch/mpi_test.py": "openmpi-bin or mpich is missing, or for two hosts Slurm's packages",
}


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.outcome != "skipped" or hasattr(report, "wasxfail") or os.environ.get("CI") != "true":
        return
    if not report.nodeid.startswith(tuple(PERMITTED)):
        report.outcome = "failed"
        report.longrepr = f"skipped, which no list permits in CI (tests/conftest.py): {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    fail_if_skipped(report)
    return report
