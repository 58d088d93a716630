"""What a model runs and who wanted it, where a change fails, a file changes or the daemon stops."""

from __future__ import annotations

import gc
import hashlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.app.keeper import ModelKeeper
from edge_runtime.app.loader import Loader
from edge_runtime.app.proof import prove
from edge_runtime.app.shelf import Shelf
from edge_runtime.app.swap import RESERVE_BYTES, MiB, Swapper
from edge_runtime.camera.av import decode_image
from edge_runtime.camera.synthetic import SyntheticCamera
from edge_runtime.clock import SystemClock
from edge_runtime.config import parse_config
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.probe import record_golden
from edge_runtime.engine.slot import Resident
from edge_runtime.errors import EdgeError, EngineError
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.activity import CacheCounters
from edge_runtime.records.commands import ReloadArgs, ReloadResult, VariantArgs
from edge_runtime.records.frames import Pixels
from tests.awaiting import wait_until
from tests.engine import bad_models
from tests.engine.graphs import SIDE, classifier, write_bundle

PLENTY = 10_000 * MiB
SCARCE = RESERVE_BYTES + 20 * MiB
VARIANTS = ("large", "middle", "small")


def three_variants(root: Path, version: str = "1") -> Path:
    """A tiny bundle whose variants differ in nothing but their names."""
    manifest = write_bundle(root, classifier(), bundle={"version": version}) / "bundle.toml"
    first, variant, rest = manifest.read_text(encoding="utf-8").partition("[[variant]]")
    manifest.write_text(first + "\n".join(variant + rest.replace("fp32", each, 1) for each in VARIANTS))
    return root


def wrong_golden(root: Path, variant: str) -> None:
    """Give a variant of the bundle a golden picture, and an answer to it that none of its models gives."""
    picture = root / "golden" / "grey.png"
    picture.parent.mkdir()
    picture.write_bytes(encode_png(np.full((SIDE, SIDE, 3), 124, np.uint8)))
    engine = load_engine(load_bundle(root), variant)
    npz = dict(np.load(io.BytesIO(record_golden(engine, engine.open_lane(), [picture], read_image))))
    engine.close()
    npz["value/y"] = npz["value/y"] + 50
    with (root / "golden" / "wrong.npz").open("wb") as stream:
        np.savez(stream, allow_pickle=False, **npz)
    manifest = root / "bundle.toml"
    text = manifest.read_text(encoding="utf-8")
    before, name, after = text.partition(f'name = "{variant}"')
    golden = 'golden = {inputs = "golden/*.png", outputs = "golden/wrong.npz", tolerance = 0.02}'
    text = before + name + "\n" + golden + after
    for path in (picture, root / "golden" / "wrong.npz"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        text = text.replace("[files]\n", f'[files]\n"{path.relative_to(root).as_posix()}" = "{digest}"\n', 1)
    manifest.write_text(text, encoding="utf-8")


def read_image(path: Path) -> Pixels:
    return decode_image(path.read_bytes())


class Device:
    """One model under one camera, as the daemon has it; `free` bytes of memory, or `free_when_down`."""

    def __init__(self, folder: Path, model: str = "") -> None:
        self.folder = folder
        self.free = self.free_when_down = PLENTY
        self.told: list[str] = []
        results: list[object] = []
        config = self.config(model)
        self.pipeline = Pipeline(results.append)
        self.loader = Loader()
        self.shelf = Shelf(folder / "store", SystemClock())
        swapper = Swapper(
            self.pipeline,
            prove=prove,
            free_bytes=self._free_bytes,
            read_image=read_image,
            cancel=self.loader.cancel,
        )
        self.keeper = ModelKeeper(
            config,
            self.pipeline,
            self.shelf,
            swapper,
            self.loader,
            tell=lambda _severity, text, _data: self.told.append(text),
            changed=lambda: None,
        )
        self.keeper.load(lambda: True)
        self.pipeline.add_camera(SyntheticCamera(name="c", url="synthetic:?width=32&height=32&fps=100"), ["m", "n"])
        self.pipeline.start()
        self.loader.start()
        wait_until(lambda: len(results) > 3, 10, "frames flow")

    def config(self, model: str = "", lanes: int = 1) -> Any:
        """The configuration with `model` in the first model's table; the second is there so that one may be down."""
        text = (
            f'[device]\nstore = "store"\n[[model]]\nname = "m"\nlanes = {lanes}\n{model or self.named("configured")}\n'
            f'[[model]]\nname = "n"\nlanes = 1\nbundle = "second"\n'
            f'[[camera]]\nname = "c"\nurl = "synthetic:"\nmodel = ["m", "n"]\n'
        )
        return parse_config(text, "config.toml", self.folder)

    @staticmethod
    def named(bundle: str) -> str:
        return f'bundle = "{bundle}"'

    def _free_bytes(self) -> int:
        return self.free if self.ladder() else self.free_when_down

    def ladder(self) -> tuple[Resident, ...]:
        pipe = self.pipeline.models.get("m")
        return () if pipe is None else pipe.desk.ladder()

    def variants(self) -> list[str]:
        return [each.info.variant for each in self.ladder()]

    def reload(self, source: Path, **options: Any) -> ReloadResult:
        digest = self.shelf.add(source).digest
        return self.keeper.reload(ReloadArgs(model="m", bundle=digest, **options))

    def sighup(self, model: str, lanes: int = 1) -> list[str]:
        return self.loader.call("SIGHUP", lambda: self.keeper.apply(self.config(model, lanes)))

    def stop(self) -> None:
        assert self.loader.stop(5.0) == []
        assert self.pipeline.stop() == []
        self.pipeline.close()


Make = Callable[..., Device]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    devices: list[Device] = []
    (tmp_path / "store").mkdir()
    three_variants(tmp_path / "configured")
    write_bundle(tmp_path / "second", classifier())

    def start(model: str = "") -> Device:
        devices.append(Device(tmp_path, model))
        return devices[-1]

    yield start
    for device in devices:
        device.stop()


def test_a_pause_that_brought_nothing_ends_with_the_very_ladder_that_ran(make: Make, tmp_path: Path) -> None:
    device = make('bundle = "configured"\nladder = ["small"]')
    assert device.variants() == ["large", "small"]
    device.keeper.switch(VariantArgs(model="m", variant="middle"))
    assert device.variants() == ["middle", "small"]
    device.free = SCARCE
    with pytest.raises(EdgeError) as caught:
        device.reload(bad_models.wrong_labels(tmp_path / "bad"), allow_pause=True)
    assert caught.value.code == "layout_mismatch"
    assert device.variants() == ["middle", "small"]
    assert device.told[-1].startswith("model m: reload: refused, middle runs on")


def test_a_reload_that_asked_for_a_variant_comes_back_to_it(make: Make, tmp_path: Path) -> None:
    device = make()
    device.reload(three_variants(tmp_path / "other", "2"), variant="small")
    device.free = SCARCE
    with pytest.raises(EdgeError):
        device.reload(bad_models.wrong_labels(tmp_path / "bad"), allow_pause=True)
    assert device.variants() == ["small"]
    assert device.keeper.source("m") == "reload"


def test_a_stop_in_a_pause_loads_nothing_any_more(make: Make, tmp_path: Path) -> None:
    device = make()
    device.free = SCARCE
    hanging = bad_models.hangs(tmp_path / "hangs")
    digest = device.shelf.add(hanging).digest
    args = ReloadArgs(model="m", bundle=digest, allow_pause=True)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(device.keeper.reload, args)
        wait_until(lambda: not device.ladder(), 10, "the pause")
        start = time.monotonic()
        assert device.loader.stop(5.0) == []
        assert time.monotonic() - start < 2
        with pytest.raises(EdgeError) as caught:
            outcome.result(5)
    assert caught.value.code == "cancelled"
    assert not device.ladder()


def test_what_a_file_says_of_batches_and_the_ladder_is_taken_over_whoever_chose_the_bundle(
    make: Make, tmp_path: Path
) -> None:
    base = 'bundle = "configured"\n'
    device = make(base + 'ladder = ["middle", "small"]')
    # a ladder that becomes shorter gives its memory back
    _, middle, small = device.ladder()
    assert device.sighup(base + 'ladder = ["small"]') == []
    assert device.variants() == ["large", "small"]
    assert middle.closed.is_set()
    assert not small.closed.is_set()
    device.reload(three_variants(tmp_path / "other", "2"), variant="middle")
    before = device.ladder()
    assert device.sighup(base + 'ladder = ["small"]') == []
    assert device.ladder() == before
    assert device.sighup(base + 'max_batch = 2\nladder = ["small"]') == []
    assert device.variants() == ["middle", "small"]
    assert [each.places for each in device.ladder()] == [2, 2]
    assert device.keeper.source("m") == "reload"


def test_a_cache_is_taken_over_at_once_and_nothing_is_loaded_for_it(make: Make) -> None:
    device = make()
    before = device.ladder()

    def asked() -> bool:
        """Whether the cache had a part in the frames of a window that has some."""
        while True:
            cut = device.pipeline.cut()
            engines = [engine for (model, _), engine in cut.engines.items() if model == "m"]
            if any(engine.counters.completed for engine in engines):
                return any(engine.cache != CacheCounters() for engine in engines)

    assert not asked()
    for cache in ("scene", "exact"):
        assert device.sighup(f'{device.named("configured")}\ncache = "{cache}"') == []
        wait_until(asked, what=f"{cache} is asked")
    assert device.sighup(device.named("configured")) == []
    wait_until(lambda: not asked(), what="nobody is asked any more")
    assert device.ladder() == before


def test_what_a_file_says_and_could_not_be_taken_over_is_tried_again(make: Make) -> None:
    base = 'bundle = "configured"\n'
    device = make(base)
    device.free = SCARCE
    (refused,) = device.sighup(base + "max_batch = 2")
    assert "does not fit into memory" in refused
    (refused,) = device.sighup(base + "max_batch = 2")
    assert "does not fit into memory" in refused
    device.free = PLENTY
    assert device.sighup(base + "max_batch = 2") == []
    assert device.ladder()[0].places == 2


def test_a_choice_that_cannot_run_is_an_alarm_until_another_one_is_made(make: Make, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "store", SystemClock())
    shelf.choose("m", shelf.add(bad_models.wrong_labels(tmp_path / "bad")).digest, "fp32")
    device = make()
    (alarm,) = device.keeper.alarms()
    assert "what was reloaded last cannot run" in alarm
    assert device.sighup('bundle = "configured"') == []
    device.keeper.switch(VariantArgs(model="m", variant="small"))
    assert device.keeper.alarms() == [alarm]
    device.keeper.reload(ReloadArgs(model="m", reset=True))
    assert device.keeper.alarms() == []


def test_a_model_that_is_down_holds_no_memory_and_comes_up_with_a_reload(make: Make, tmp_path: Path) -> None:
    def sessions() -> int:
        gc.collect()
        return sum(type(each).__name__ == "InferenceSession" for each in gc.get_objects())

    before = sessions()
    write_bundle(tmp_path / "broken", classifier(), labels=("only", "two"))
    device = make('bundle = "broken"')
    assert device.variants() == []
    assert sessions() == before + 1  # of the other model
    with pytest.raises(EngineError) as caught:
        device.keeper.switch(VariantArgs(model="m", variant="small"))
    assert caught.value.code == "model_down"
    assert device.sighup('bundle = "broken"\nladder = ["small", "tiny"]') != []
    done = device.reload(three_variants(tmp_path / "other", "2"))
    assert (done.previous, done.persisted, done.variant) == (None, True, "large")
    assert device.variants() == ["large", "small"]
    assert done.notes == ["not on the ladder, since the bundle has none for onnxruntime: tiny"]
    again = device.reload(tmp_path / "other")
    assert (again.changed, again.persisted) == (False, True)


def test_lanes_of_a_file_are_taken_over_whoever_chose_the_bundle(make: Make, tmp_path: Path) -> None:
    device = make()
    desk = device.pipeline.models["m"].desk
    for lanes in (3, 1):
        assert device.sighup(f"{device.named('configured')}\n", lanes=lanes) == []
        assert (desk.lanes, [len(each.lanes) for each in device.ladder()]) == (lanes, [lanes])
    other = three_variants(tmp_path / "other", "2")
    device.reload(other, variant="middle")
    assert device.sighup(device.named("configured"), lanes=2) == []
    assert (desk.lanes, device.variants(), len(device.ladder()[0].lanes)) == (2, ["middle"], 2)
    # where the new engines cannot be, the lanes stay with the old ones
    device.free = SCARCE
    (left,) = device.sighup(device.named("configured"), lanes=4)
    assert "does not fit into memory" in left
    (left,) = device.sighup(device.named("configured"), lanes=1)
    assert "does not fit into memory" in left
    assert (desk.lanes, len(device.ladder()[0].lanes)) == (2, 2)
    device.free = PLENTY
    assert device.sighup(device.named("configured"), lanes=1) == []
    assert (desk.lanes, len(device.ladder()[0].lanes)) == (1, 1)


def test_a_ladder_that_cannot_be_whole_costs_no_model(make: Make, tmp_path: Path) -> None:
    """One of its engines answers otherwise than its golden pictures say: nobody can switch to it."""
    wrong_golden(tmp_path / "configured", "small")
    device = make('bundle = "configured"\nladder = ["middle", "small"]')
    assert device.variants() == ["large", "middle"]
    (alarm,) = device.keeper.alarms()
    assert "small is not on its ladder" in alarm
    with pytest.raises(EdgeError):
        device.keeper.switch(VariantArgs(model="m", variant="small"))
    assert device.variants() == ["large", "middle"]
    device.keeper.switch(VariantArgs(model="m", variant="middle"))
    assert device.variants()[0] == "middle"


# --- the governor's choice

LADDER = 'bundle = "configured"\nladder = ["middle", "small"]'


def costs(device: Device, **seconds: float) -> None:
    """Let the variants of the tiny bundle, all alike, cost something."""
    for each in device.ladder():
        each.run_cpu_s = seconds[each.info.variant]


def offered(device: Device) -> list[str]:
    return [each.name for each in device.keeper.site_models()[0].variants]


def test_what_the_governor_may_choose_from_is_what_costs_less_than_what_is_wanted(make: Make) -> None:
    device = make(LADDER)
    assert all(each.run_cpu_s for each in device.ladder())  # measured at the start, where there is a choice
    assert device.pipeline.models["n"].desk.ladder()[0].run_cpu_s is None
    costs(device, large=0.03, middle=0.02, small=0.01)
    first, second = device.keeper.site_models()
    assert [(each.name, each.busy_s) for each in first.variants] == [("large", 0.03), ("middle", 0.02), ("small", 0.01)]
    assert (first.name, first.lanes, first.places, first.batch_timeout_ms) == ("m", 1, 1, 20.0)
    assert [each.name for each in second.variants] == ["fp32"]
    costs(device, large=0.02, middle=0.03, small=0.01)
    assert offered(device) == ["large", "small"]
    assert device.keeper.prefer("m", "small")
    assert offered(device) == ["large", "small"]
    device.keeper.switch(VariantArgs(model="m", variant="middle"))
    assert offered(device) == ["middle", "large", "small"]


def test_the_governors_choice_is_not_what_people_want(make: Make) -> None:
    device = make(LADDER)
    costs(device, large=0.03, middle=0.02, small=0.01)
    told = len(device.told)
    ladder = set(device.ladder())
    assert device.keeper.prefer("m", "small")
    assert (device.variants()[0], set(device.ladder())) == ("small", ladder)
    assert device.keeper.reported()[0].variant == "small"
    assert device.keeper.prefer("m", "small")
    assert not device.keeper.prefer("m", "huge")
    assert not device.keeper.prefer("x", "small")
    assert (device.variants()[0], len(device.told)) == ("small", told)
    # a file that says nothing new leaves the choice to the governor, one that does begins anew, and so does a command
    assert device.sighup(LADDER) == []
    assert device.variants()[0] == "small"
    assert offered(device)[0] == "large"
    assert device.sighup(LADDER + '\nvariant = "middle"') == []
    assert (device.variants()[0], offered(device)) == ("middle", ["middle", "small"])
    assert device.keeper.prefer("m", "small")
    device.keeper.switch(VariantArgs(model="m", variant="middle"))
    assert device.variants()[0] == "middle"
    assert device.keeper.prefer("m", "small")
    assert device.sighup('bundle = "configured"\nladder = ["large"]\nvariant = "middle"') == []
    assert device.variants() == ["middle", "large"]
    device.pipeline.models["m"].desk.exchange(None, "down")
    assert not device.keeper.prefer("m", "middle")
    assert offered(device) == ["middle"]


def test_the_governor_keeps_out_of_a_change_and_finds_its_choice_again_where_it_failed(
    make: Make, tmp_path: Path
) -> None:
    device = make(LADDER)
    assert device.keeper.prefer("m", "small")
    before = device.ladder()
    digest = device.shelf.add(bad_models.wrong_labels(tmp_path / "bad")).digest
    seen: list[tuple[bool, bool]] = []
    changing = device.keeper.changing
    prove_before = device.keeper._swapper._prove

    def proving(*args: Any, **options: Any) -> Any:
        seen.append((changing("m"), device.keeper.prefer("m", "middle")))
        assert not changing("n")
        return prove_before(*args, **options)

    device.keeper._swapper._prove = proving
    with pytest.raises(EdgeError):
        device.keeper.reload(ReloadArgs(model="m", bundle=digest))
    assert seen == [(True, False)]
    assert not changing("m")
    assert device.ladder() == before
    assert device.keeper.prefer("m", "middle")


def test_reloads_and_choices_at_once_end_with_what_was_reloaded(make: Make, tmp_path: Path) -> None:
    device = make(LADDER)
    first = device.ladder()
    bundles = [device.shelf.add(three_variants(tmp_path / name, name)).digest for name in ("2", "3")]
    ended = threading.Event()
    chosen: list[bool] = []

    def choose() -> None:
        while not ended.is_set():
            chosen.append(device.keeper.prefer("m", VARIANTS[len(chosen) % 3]))
            ended.wait(0.001)

    with ThreadPoolExecutor(1) as pool:
        choosing = pool.submit(choose)
        for digest in bundles:
            device.keeper.reload(ReloadArgs(model="m", bundle=digest))
        ended.set()
        choosing.result(5)
    assert {True, False} <= set(chosen)
    assert {each.info.bundle for each in device.ladder()} == {bundles[-1]}
    assert sorted(device.variants()) == sorted(VARIANTS)
    assert all(each.closed.is_set() for each in first)
    assert device.pipeline.ledger.totals("m").failed == 0
