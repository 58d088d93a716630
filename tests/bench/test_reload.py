"""Reloads under load, few of them: what must hold however busy the machine is."""

from __future__ import annotations

import pytest

from edge_runtime.app.models import open_bundle
from edge_runtime.bench.reload import measure_reload


@pytest.mark.full
@pytest.mark.timeout(600)
def test_thirty_reloads_lose_nothing_and_leave_nothing() -> None:
    bundle = open_bundle("bundled:centernet")
    done = measure_reload([(bundle, "fp32-320"), (bundle, "fp32-416")], reloads=30, fps=8.0)
    print(done)
    assert (done.reloads, done.refused) == (30, 0)
    assert (done.mixed_batches, done.out_of_order) == (0, 0)
    assert (done.disturbed.failed, done.disturbed.dropped) == (0, 0)
    assert done.exchange_ms[0] <= 1.0
    assert done.threads[1] <= done.threads[0]
    assert done.descriptors[1] <= done.descriptors[0]
    assert done.rss_late_mb - done.rss_early_mb <= 5.0
