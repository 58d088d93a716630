"""What a format costs: measured in turn, by a clock that tests can set; and what `--pixel auto` makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.cli.main import run
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.errors import EXIT_DONE, EXIT_REFUSED, RefusedError, UsageError
from edge_runtime.prepare import fuse as room
from edge_runtime.prepare.fuse import fuse_bundle
from edge_runtime.prepare.fuse_graph import fuse_graph
from edge_runtime.prepare.input_cost import InputCost, measure_inputs
from edge_runtime.prepare.noise import Noise
from edge_runtime.records.frames import InputArray, Transform
from edge_runtime.records.spec import InputSpec, Pixel
from tests.engine.graphs import SIDE, classifier, write_bundle
from tests.prepare.exports import pictures, read_image

SPEC = InputSpec(SIDE, SIDE)
BYTES: tuple[Pixel, ...] = ("bgr24", "rgba", "nv12")


class Costly(Noise):
    """A picture that moves a clock as it is written: a format's cost is what the test says, and a little noise."""

    def __init__(self, clock: list[int], costs: dict[Pixel, int]) -> None:
        super().__init__(1)
        object.__setattr__(self, "clock", clock)
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "rng", np.random.default_rng(3))
        object.__setattr__(self, "seen", [])

    def write_into(self, place: InputArray, spec: InputSpec) -> Transform:
        self.seen.append(spec.pixel)  # type: ignore[attr-defined]
        self.clock[0] += self.costs[spec.pixel] + int(self.rng.integers(0, 200))  # type: ignore[attr-defined]
        return super().write_into(place, spec)


def measured(costs: dict[Pixel, int], repeats: int = 24) -> tuple[Costly, dict[Pixel, InputCost]]:
    clock = [0]
    picture = Costly(clock, costs)
    models: dict[Pixel, tuple[bytes, InputSpec]] = {"float32": (classifier(), SPEC)}
    for pixel in BYTES:
        spec = replace(SPEC, pixel=pixel)
        models[pixel] = fuse_graph(classifier(), spec, "m"), spec
    found = measure_inputs(models, [picture], "m", repeats=repeats, clock=lambda: clock[0])
    return picture, {cost.pixel: cost for cost in found}


def test_ratios_within_a_frame_say_what_is_faster() -> None:
    _, found = measured({"float32": 10_000, "bgr24": 8_000, "rgba": 10_000, "nv12": 12_000})
    assert list(found) == ["float32", *BYTES]
    assert (found["float32"].ratio, found["float32"].faster) == (1.0, False)
    assert 0.78 < found["bgr24"].low <= found["bgr24"].ratio <= found["bgr24"].high < 0.83
    assert [pixel for pixel, cost in found.items() if cost.faster] == ["bgr24"]
    assert found["rgba"].low < 1.005
    assert found["nv12"].low > 1.15
    assert 0.0079 < found["bgr24"].write_ms < 0.0083
    assert found["bgr24"].run_ms == 0


def test_a_quarter_of_the_bytes_moves() -> None:
    _, found = measured(dict.fromkeys(("float32", *BYTES), 1000))
    whole = found["float32"].frame_bytes
    assert whole == SIDE * SIDE * 12
    assert [whole / found[pixel].frame_bytes for pixel in BYTES] == [4, 3, 8]


def test_every_format_comes_first_as_often() -> None:
    picture, _ = measured(dict.fromkeys(("float32", *BYTES), 1000), repeats=8)
    seen = picture.seen[8:]  # type: ignore[attr-defined]
    firsts = seen[::4]
    assert {pixel: firsts.count(pixel) for pixel in firsts} == dict.fromkeys(("float32", *BYTES), 2)
    assert all(sorted(seen[turn : turn + 4]) == sorted(("float32", *BYTES)) for turn in range(0, len(seen), 4))


def test_no_frames_are_refused() -> None:
    with pytest.raises(UsageError, match="no frames"):
        measure_inputs({"float32": (classifier(), SPEC)}, [], "m")


# --- the command


Said = Callable[[dict[str, tuple[float, float]]], None]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """Sets what the measurement says: by size and format (ratio, high)."""

    def set_to(ratios: dict[str, tuple[float, float]]) -> None:
        def measure(models: Any, frames: Any, where: str, *, repeats: int) -> tuple[InputCost, ...]:
            assert (len(frames), repeats) == (1, 60)
            found = []
            for pixel, (_, spec) in models.items():
                ratio, high = ratios.get(f"{spec.width} {pixel}", (1.0, 1.0))
                found.append(InputCost(pixel, 10, 1.0, 2.0, ratio, ratio - 0.01, high))
            return tuple(found)

        monkeypatch.setattr(room, "measure_inputs", measure)

    return set_to


def bundle_of(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "b", classifier(shape=("batch", 3, "h", "w")))


def test_auto_makes_what_is_fastest(tmp_path: Path, said: Said) -> None:
    source = load_bundle(bundle_of(tmp_path))
    shown = pictures(tmp_path / "shown", 2)
    said({"32 bgr24": (0.9, 0.95), "32 rgba": (0.8, 1.01), "32 nv12": (0.85, 0.99)})
    result = fuse_bundle(
        source, tmp_path / "out", pixel="auto", read_image=read_image, pictures=shown, frames=[Noise(1)]
    )
    assert result.bundle.variants == ("fp32-nv12",)
    assert any("fp32 bgr24: 3.00 ms of CPU a frame" in note and "0.900 of float32" in note for note in result.notes)
    assert [cost.pixel for cost in result.costs["fp32"]] == ["float32", *BYTES]


def test_auto_leaves_the_order_of_variants(tmp_path: Path, said: Said) -> None:
    """A daemon takes the first: a format that pays at a small size does not make that size the better one."""
    root = bundle_of(tmp_path)
    text = (root / "bundle.toml").read_text()
    small = text[text.index("[[variant]]") :].replace('"fp32"', '"small"', 1).replace("[32, 32]", "[16, 16]")
    (root / "bundle.toml").write_text(f"{text}\n{small}")
    source = load_bundle(root)
    assert source.variants == ("fp32", "small")
    said({"16 bgr24": (0.9, 0.95)})
    options: dict[str, Any] = {
        "pixel": "auto", "read_image": read_image, "pictures": pictures(tmp_path / "shown", 2), "frames": [Noise(1)],
    }  # fmt: skip
    result = fuse_bundle(source, tmp_path / "out", **options)
    assert result.bundle.variants == ("fp32", "small-bgr24", "small")
    said({"16 bgr24": (0.9, 0.95), "32 nv12": (0.9, 0.95)})
    assert fuse_bundle(source, tmp_path / "both", **options).bundle.variants == ("fp32-nv12", "small-bgr24")


def test_auto_writes_nothing_where_float_is_faster(tmp_path: Path, said: Said) -> None:
    source = load_bundle(bundle_of(tmp_path))
    said({"32 bgr24": (0.98, 1.02), "32 nv12": (1.2, 1.3)})
    with pytest.raises(RefusedError, match=r"float32 is as fast as bytes here.*bgr24 0\.980") as caught:
        fuse_bundle(source, tmp_path / "out", pixel="auto", read_image=read_image, frames=[Noise(1)])
    assert (caught.value.code, caught.value.exit_code) == ("float_is_faster", EXIT_REFUSED)
    assert not (tmp_path / "out").exists()


def test_the_command_measures_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it finds is this machine's matter; that it says what it found is not."""
    root = bundle_of(tmp_path)
    shown = [str(path) for path in pictures(tmp_path / "shown", 2)]
    arguments = ["prepare", "fuse", str(root), str(tmp_path / "out"), "--pixel", "auto", "--frames", *shown]
    code = run([*arguments, "--images", *shown, "--json"])
    captured = capsys.readouterr()
    if code == EXIT_DONE:
        document = json.loads(captured.out)
        costs = document["costs"]["fp32"]
        assert [cost["pixel"] for cost in costs] == ["float32", *BYTES]
        best = min((cost for cost in costs if cost["high"] < 1), key=lambda cost: float(cost["ratio"]))
        assert document["variants"] == [f"fp32-{best['pixel']}"]
    else:
        assert code == EXIT_REFUSED
        assert "float32 is as fast as bytes here" in captured.err
        assert not (tmp_path / "out").exists()


def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = [str(path) for path in pictures(tmp_path / "shown", 1)]
    arguments = ["bench", "input", "--bundle", str(bundle_of(tmp_path)), "--frames", *shown, "--repeats", "3"]
    assert run([*arguments, "--json"]) == EXIT_DONE
    (measured,) = json.loads(capsys.readouterr().out).values()
    assert [cost["pixel"] for cost in measured] == ["float32", *BYTES]
    assert run(arguments) == EXIT_DONE
    assert "ms of CPU a frame" in capsys.readouterr().out
