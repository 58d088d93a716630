"""Lanes shared out over cores, and `max_batch = "auto"` measured on the engine itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_runtime.app.models import choose_batch, ladder_of, lanes_for, load_variant, open_bundle, run_cpu_s
from edge_runtime.config import ModelConfig
from edge_runtime.errors import BundleError
from tests.fakes import FakeEngine


def model(name: str, lanes: int | str = "auto") -> ModelConfig:
    return ModelConfig.model_validate(
        {"name": name, "bundle": "bundled:centernet", "lanes": lanes}, context={"base": Path("/")}
    )


@pytest.mark.parametrize(
    ("cores", "lanes", "expected"),
    [
        (2, ["auto"], [2]),
        (2, ["auto", "auto"], [1, 1]),
        (6, ["auto", "auto"], [3, 3]),
        (7, ["auto", "auto"], [4, 3]),
        (2, ["auto", "auto", "auto"], [1, 1, 1]),  # never none, even where that is more than there are cores
        (8, [3, "auto"], [3, 5]),
        (2, [4], [4]),
    ],
)
def test_lanes(monkeypatch: pytest.MonkeyPatch, cores: int, lanes: list[int | str], expected: list[int]) -> None:
    # a cpuset or taskset counts, not what the machine has
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    models = [model(f"m{index}", count) for index, count in enumerate(lanes)]
    assert list(lanes_for(models).values()) == expected


def test_auto_takes_batches_where_a_call_costs_more_than_a_frame() -> None:
    engine = FakeEngine(call_cost_s=0.02, frame_cost_s=0.0005)
    assert choose_batch(engine, "auto", streams=16) == 8
    assert choose_batch(engine, "auto", streams=4) == 4
    # one camera can't fill a batch: nothing is measured
    engine.runs.clear()
    assert choose_batch(engine, "auto", streams=1) == 1
    assert engine.runs == []


def test_auto_leaves_it_at_one_where_frames_cost_the_same_together() -> None:
    assert choose_batch(FakeEngine(frame_cost_s=0.005), "auto", streams=16) == 1


def test_a_number_is_taken_as_it_is_and_allowed_sizes_are_respected() -> None:
    assert choose_batch(FakeEngine(), 5, streams=1) == 5
    engine = FakeEngine(call_cost_s=0.02, allowed=(2, 6))
    assert choose_batch(engine, "auto", streams=16) == 6
    assert choose_batch(engine, "auto", streams=1) == 2
    assert set(engine.runs) <= {2, 6}
    assert engine.errors == []


def test_the_bundled_model_loads_and_closes() -> None:
    bundle = open_bundle("bundled:centernet")
    resident = load_variant(bundle, "fp32-320", model("m"), lanes=2, streams=1)
    assert (resident.info.variant, resident.places, len(resident.lanes)) == ("fp32-320", 1, 2)
    assert 0 < run_cpu_s(resident) < 2
    resident.close()


def test_a_ladder_has_what_the_bundle_has_and_the_one_that_runs_first() -> None:
    bundle = open_bundle("bundled:centernet")
    config = model("m").model_copy(update={"ladder": ("fp32-320", "int8-320", "fp32-416")})
    assert ladder_of(bundle, config, "auto") == ("fp32-512", "fp32-320", "fp32-416")
    assert ladder_of(bundle, config, "fp32-416") == ("fp32-416", "fp32-320")
    with pytest.raises(BundleError, match="there is no variant"):
        ladder_of(bundle, config, "int8-320")
