"""What the meter counts, refuses, saves and takes up again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from numpy.typing import NDArray

from edge_runtime.errors import BundleError, EdgeError, UsageError
from edge_runtime.prepare.quant import TensorRange
from edge_runtime.prepare.quant_graph import activations, float_model
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.records.frames import Transform
from edge_runtime.records.spec import InputSpec
from tests.engine.graphs import graph, node

SPEC = InputSpec(width=8, height=8)


class Picture:
    """Noise of 0 to 255, or what is given."""

    def __init__(self, seed: int, fill: float | None = None, side: int = 8) -> None:
        self.width = self.height = side
        self.values = np.random.default_rng(seed).uniform(0, 255, (3, side, side)).astype(np.float32)
        if fill is not None:
            self.values[0, 0, 0] = fill

    def write_into(self, place: Any, spec: InputSpec) -> Transform:
        place[...] = self.values
        side = self.width
        return Transform(side, side, side, side, side, side, 0, 0)

    def to_rgb(self) -> NDArray[np.uint8]:
        raise NotImplementedError


def model(weight: float = 0.5, batch: Any = "batch") -> Any:
    weights = np.full((3, 3, 1, 1), weight, np.float32)
    nodes = [node("Conv", ["x", "w"], ["a"]), node("Relu", ["a"], ["r"]), node("Conv", ["r", "w2"], ["y"])]
    shape = (batch, 3, 8, 8)
    data = graph(nodes, outputs=[("y", shape)], shape=shape, initializers={"w": weights, "w2": -weights})
    return float_model(data, "m.onnx")


def meter(**options: Any) -> ActivationMeter:
    made = model(**options)
    return ActivationMeter(made, activations(made), "m.onnx")


def names(pictures: Sequence[int]) -> list[str]:
    return [f"{seed}.jpg" for seed in pictures]


def test_it_counts_what_the_model_computes() -> None:
    made = meter()
    assert made.tensors == ("x", "a", "r", "y")
    pictures = [Picture(seed) for seed in range(3)]
    made.show(pictures, SPEC)
    values = np.stack([picture.values for picture in pictures])
    found = made.ranges("minmax", symmetric=False)
    sums = values.sum(axis=1) * 0.5
    assert found["x"].low == 0
    assert found["x"].high == values.max()
    assert found["a"].high == pytest.approx(sums.max(), rel=1e-5)
    assert found["y"].low == pytest.approx(-1.5 * sums.max(), rel=1e-5)
    assert found["y"].high == 0
    assert made.histogram("x").counts.sum() == values.size
    assert made.ranges("mse", symmetric=True)["y"].low < 0


def test_the_order_of_pictures_does_not_matter() -> None:
    one, other = meter(), meter()
    one.show([Picture(seed) for seed in (1, 2, 3)], SPEC)
    other.show([Picture(seed) for seed in (3, 1, 2)], SPEC)
    for method in ("minmax", "entropy", "percentile", "mse"):
        assert one.ranges(method, symmetric=False) == other.ranges(method, symmetric=False)


def test_a_fixed_batch_is_filled_with_the_picture() -> None:
    one, other = meter(), meter(batch=2)
    one.show([Picture(1)], SPEC)
    other.show([Picture(1)], SPEC)
    assert one.ranges("percentile", symmetric=True) == other.ranges("percentile", symmetric=True)


@pytest.mark.parametrize("fill", [np.inf, np.nan, 3e38])
def test_values_that_are_not_finite_are_refused_and_not_counted(fill: float) -> None:
    made = meter(weight=4.0)
    made.show([Picture(1)], SPEC)
    before = made.ranges("minmax", symmetric=False)
    with pytest.raises(BundleError) as caught:
        made.show([Picture(2, fill)], SPEC)
    assert caught.value.code == "non_finite"
    assert made.pictures == 1
    assert made.ranges("minmax", symmetric=False) == before


def test_no_ranges_before_a_picture() -> None:
    with pytest.raises(UsageError) as caught:
        meter().ranges("minmax", symmetric=False)
    assert caught.value.code == "too_few_pictures"


def test_it_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    whole, first, second = meter(), meter(), meter()
    whole.show([Picture(seed) for seed in range(5)], SPEC)
    first.show([Picture(seed) for seed in range(2)], SPEC)
    first.save(tmp_path / "state.npz", names(range(2)))
    assert second.restore(tmp_path / "state.npz", names(range(5))) == 2
    second.show([Picture(seed) for seed in range(2, 5)], SPEC)
    assert second.pictures == 5
    assert second.ranges("mse", symmetric=False) == whole.ranges("mse", symmetric=False)
    for made, path in ((whole, "a"), (second, "b")):
        made.save(tmp_path / path, names(range(5)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("listed", [names([0, 7, 2]), names([0]), names([1, 0])])
def test_a_state_of_other_pictures_is_refused(tmp_path: Path, listed: list[str]) -> None:
    made = meter()
    made.show([Picture(0), Picture(1)], SPEC)
    made.save(tmp_path / "state", names(range(2)))
    fresh = meter()
    with pytest.raises(UsageError) as caught:
        fresh.restore(tmp_path / "state", listed)
    assert caught.value.code == "state_unlike"
    assert fresh.pictures == 0


def test_a_state_of_another_model_or_other_tensors_is_refused(tmp_path: Path) -> None:
    made = meter()
    made.save(tmp_path / "state", [])
    other = model()
    for fresh in (meter(weight=0.75), ActivationMeter(other, ["x"], "m.onnx")):
        with pytest.raises(UsageError, match="another model"):
            fresh.restore(tmp_path / "state", [])


def test_a_state_of_another_input_is_refused(tmp_path: Path) -> None:
    """The same model and pictures, and a mean that was changed since."""
    made = meter()
    made.show([Picture(0)], SPEC)
    made.save(tmp_path / "state", names([0]))
    other = replace(SPEC, mean=(1.0, 2.0, 3.0))
    fresh = meter()
    with pytest.raises(UsageError, match="made ready in another way") as caught:
        fresh.restore(tmp_path / "state", names([0]), [other])
    assert (caught.value.code, fresh.pictures) == ("state_unlike", 0)
    assert fresh.restore(tmp_path / "state", names([0]), [SPEC]) == 1
    # what was seen in both ways is of neither, whoever saves it again
    fresh.show([Picture(1)], other)
    fresh.save(tmp_path / "both", names([0, 1]))
    for spec in (SPEC, other):
        with pytest.raises(UsageError, match="made ready in another way"):
            meter().restore(tmp_path / "both", names([0, 1]), [spec])


@pytest.mark.parametrize("fault", ["negative counts", "few bins", "no end", "low above zero", "pictures", "rows"])
def test_a_state_that_save_does_not_write_is_refused(tmp_path: Path, fault: str) -> None:
    made = meter()
    made.show([Picture(0)], SPEC)
    made.save(tmp_path / "state", names([0]))
    with np.load(tmp_path / "state") as stored:
        held = dict(stored)
    if fault == "negative counts":
        held["counts"][0, 0] = -1
    elif fault == "few bins":
        held["counts"] = held["counts"][:, 1:]
    elif fault == "no end":
        held["ends"][1, 1] = np.nan
    elif fault == "low above zero":
        held["ends"][1, 0] = 1
    elif fault == "pictures":
        held["pictures"] = np.int64(-1)
    else:
        for key in ("counts", "places", "ends"):
            held[key] = held[key][1:]
    with (tmp_path / "odd").open("wb") as stream:
        np.savez(stream, **held)
    before = made.ranges("minmax", symmetric=False)
    with pytest.raises(UsageError) as caught:
        made.restore(tmp_path / "odd", names([0]))
    assert caught.value.code in ("state_damaged", "state_unlike")
    assert made.ranges("minmax", symmetric=False) == before


def test_an_output_of_nothing_is_no_fault() -> None:
    """Detections of a picture without any, say."""
    nodes = [node("Conv", ["x", "w"], ["a"]), node("Slice", ["a", "at", "at", "axis"], ["y"])]
    stored = {"w": np.ones((3, 3, 1, 1), np.float32), "at": np.array([0]), "axis": np.array([1])}
    data = graph(nodes, outputs=[("y", ("batch", "some", 8, 8))], shape=("batch", 3, 8, 8), initializers=stored)
    made = ActivationMeter(onnx.load_model_from_string(data), ["a", "y"], "m.onnx")
    made.show([Picture(0)], SPEC)
    assert made.histogram("y").counts.sum() == 0
    assert made.ranges("mse", symmetric=False)["y"] == TensorRange(0.0, 0.0)


@pytest.mark.parametrize("damage", ["short", "empty", "garbage", "missing"])
def test_a_damaged_state_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state"
    made = meter()
    made.save(path, [])
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"short": data[: len(data) // 2], "empty": b"", "garbage": b"PK" + bytes(100)}[damage])
    with pytest.raises(UsageError) as caught:
        made.restore(path, [])
    assert caught.value.code == "state_damaged"


def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    made = meter()
    with pytest.raises(EdgeError) as caught:
        made.save(tmp_path / "no folder" / "state", [])
    assert caught.value.code == "write_failed"
    with pytest.raises(ValueError, match="1 names for 0 pictures"):
        made.save(tmp_path / "state", ["a"])


@pytest.mark.full
@pytest.mark.assets
@pytest.mark.timeout(600)
def test_memory_is_bounded_at_416_px(assets: Path) -> None:
    """In a process of its own: below 1.5 GB, and after 60 pictures what it was after 10."""
    done = subprocess.run(
        [sys.executable, __file__, str(assets / "models" / "yolox_nano_416.onnx")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    early, late = (int(each) for each in done.stdout.split())
    assert late < 1_500_000_000
    assert late < early + 30_000_000


def measure_memory(path: Path, pictures: int) -> None:
    """Print the most resident bytes over the first 10 pictures, and after them."""
    made = float_model(path.read_bytes(), path.name)
    counted = ActivationMeter(made, activations(made), path.name)
    process = psutil.Process()
    rss: list[int] = []

    def shown() -> Iterator[Picture]:
        for seed in range(pictures):
            yield Picture(seed, side=416)
            rss.append(process.memory_info().rss)

    counted.show(shown(), InputSpec(width=416, height=416))
    counted.ranges("mse", symmetric=False)
    rss.append(process.memory_info().rss)
    print(max(rss[:10]), max(rss[10:]))


if __name__ == "__main__":
    measure_memory(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60)
