"""What the hosts start from is made while the tests before them run: on a fresh machine that takes most of a minute."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.systemd.host import ROOT, TOOL


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins it where any of these tests is going to run; the first of them waits for it."""
    ours = any("tests/systemd/" in item.nodeid for item in session.items)
    if ours and TOOL.is_file() and not session.config.option.collectonly:
        command = [sys.executable, "-m", "tests.systemd.host"]
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
