"""What every test gets: no leaked threads, and the assets that may not be committed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path(os.environ.get("EDGE_RUNTIME_ASSETS") or ROOT.parent / "shared" / "assets")

_THREAD_GRACE_S = 2.0


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of models, clips and images that may not be committed; goes with the marker `assets`."""
    if not ASSETS.is_dir():
        pytest.skip(f"no assets: {ASSETS} is not there (EDGE_RUNTIME_ASSETS)")
    return ASSETS


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fails a test that leaves a thread behind. Threads of wider fixtures start before it and may stay."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _THREAD_GRACE_S
    while leaked := [thread for thread in threading.enumerate() if thread not in before and _is_ours(thread)]:
        if time.monotonic() > deadline:
            pytest.fail(f"threads still alive after the test: {', '.join(thread.name for thread in leaked)}")
        leaked[0].join(0.02)


def _is_ours(thread: threading.Thread) -> bool:
    """Threads that a C library starts are dummies here, and live as long as the library likes."""
    return thread.is_alive() and not isinstance(thread, threading._DummyThread)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("assets") and not ASSETS.is_dir():
        pytest.skip(f"no assets: {ASSETS} is not there (EDGE_RUNTIME_ASSETS)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """CI may not skip a test for want of assets while they are there."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.get_closest_marker("assets") and ASSETS.is_dir() and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"skipped in CI although {ASSETS} is there: {report.longrepr}"
    return report
