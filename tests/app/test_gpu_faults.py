"""The count of the GPU's faults: it outlives the process, and never costs more than itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.app.gpu_faults import FAULTS_NAME, GpuFaults
from edge_runtime.clock import SystemClock


def faults(folder: Path) -> GpuFaults:
    return GpuFaults(folder / FAULTS_NAME, SystemClock())


def test_every_start_goes_on_counting(tmp_path: Path) -> None:
    assert faults(tmp_path).count == 0
    for start in (1, 2, 3):
        assert faults(tmp_path).add("an illegal memory access (700)" * 50) == start
    assert faults(tmp_path).count == 3
    assert [each.name for each in tmp_path.iterdir()] == [FAULTS_NAME]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"schema": "edge.gpu-faults/1", "count": -1, "error": "", "t_utc": ""}']
)
def test_a_damaged_file_counts_from_0_and_says_so(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FAULTS_NAME).write_bytes(content)
    found = faults(tmp_path)
    assert found.count == 0
    assert "counted from 0" in caplog.text
    assert found.add("x") == faults(tmp_path).count == 1


def test_a_disk_that_refuses_costs_the_count_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = faults(tmp_path / "gone")
    assert found.add("x") == 1
    assert "cannot be written" in caplog.text
