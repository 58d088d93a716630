"""What the governor sees of a pipeline and does to it, beside what people and configurations do to it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.app.budget import BudgetKeeper
from edge_runtime.app.camera_set import open_source
from edge_runtime.app.cameras import CameraKeeper
from edge_runtime.app.governing import NO_LIMIT, Governing, find_profile
from edge_runtime.app.machine import Machine, simulated
from edge_runtime.app.overlay import OverlayFile
from edge_runtime.config import parse_config
from edge_runtime.governor.controller import Controller
from edge_runtime.governor.profile import Profile, ProfilePoint, parse_profile, save_profile
from edge_runtime.hardware.energy import IdlePower
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.pipeline.desk import Desk
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.commands import SetBudgetArgs
from edge_runtime.records.governing import Budget, Decision, GovernorSample, OperatingPoint
from edge_runtime.records.power import Unavailable
from edge_runtime.sim.sensors import Fault
from tests.app.test_keeper import Device, costs, three_variants
from tests.awaiting import wait_until
from tests.engine.graphs import classifier, write_bundle

MODEL = 'bundle = "configured"\nladder = ["middle", "small"]'
LIGHT = {"m": "small", "n": "fp32"}


class Governed:
    """A device of test_keeper on a simulated module. `told`: every decision."""

    def __init__(self, folder: Path, budget: str, faults: tuple[Fault, ...] = ()) -> None:
        self.device = Device(folder, MODEL)
        costs(self.device, large=0.03, middle=0.02, small=0.01)
        pipeline = self.device.pipeline
        config = self.device.config(MODEL + (f"\n[budget]\n{budget}" if budget else ""))
        self.machine = simulated(
            "orin-nano-8gb", pipeline, on_switch=lambda _: None, on_death=self._died, faults=faults
        )
        self.budget = BudgetKeeper(config.budget, tell=lambda *_: None)
        self.cameras = CameraKeeper(
            config.cameras,
            ["m", "n"],
            pipeline,
            OverlayFile(folder / "store" / "cameras.json"),
            open_source,
            tell=lambda *_: None,
            changed=lambda: None,
        )
        self.sampler = Sampler(self.machine.sensors, idle=self.machine.idle, on_death=self._died)
        self._cap: float | None = None
        camera = pipeline.camera("c")
        assert camera is not None
        vars(camera)["set_cap"] = self._capped
        self.told: list[tuple[Decision, Budget]] = []
        self.hold: str | None = None
        self.dead: list[BaseException] = []
        self.sampler.start()
        self.governing = Governing(
            pipeline,
            self.device.keeper,
            self.cameras,
            self.budget.current,
            self.sampler,
            profile=None,
            clock=self.machine.clock,
            tell=self._told,
            hold=lambda: self.hold,
            on_death=self._died,
        )

    @property
    def desk(self) -> Desk:
        return self.device.pipeline.models["m"].desk

    def speed(self) -> float:
        clock = self.machine.clock
        assert clock is not None
        return (clock.hz() or 0.0) / clock.steps_hz()[-1]

    def variants(self) -> dict[str, str]:
        found = {name: model.desk.resident() for name, model in self.device.pipeline.models.items()}
        return {name: each.info.variant for name, each in found.items() if each is not None}

    def _told(self, decision: Decision, budget: Budget, _: GovernorSample) -> None:
        self.told.append((decision, budget))

    def _capped(self, fps: float | None) -> None:
        self._cap = fps

    def held(self) -> float | None:
        """What the camera is held to, frames per second."""
        return self._cap

    def _died(self, _: str, error: BaseException) -> None:
        self.dead.append(error)

    def stop(self) -> None:
        assert self.governing.stop(2.0) == []
        self.device.stop()
        self.governing.close()
        assert self.sampler.stop(2.0) == []
        assert self.dead == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    three_variants(tmp_path / "configured")
    write_bundle(tmp_path / "second", classifier())
    return tmp_path


@pytest.fixture
def made() -> Iterator[list[Governed]]:
    all_of_them: list[Governed] = []
    yield all_of_them
    for each in all_of_them:
        each.stop()


def make(made: list[Governed], folder: Path, budget: str = "", **options: Any) -> Governed:
    made.append(Governed(folder, budget, **options))
    return made[-1]


def test_cameras_come_and_go_under_a_governor(made: list[Governed], folder: Path) -> None:
    governed = make(made, folder, "power_w = 6\ntemperature_c = 80")
    governed.governing.begin()
    governed.governing.start()

    def governs(*names: str) -> None:
        told = len(governed.told)
        wait_until(lambda: len(governed.told) > told + 1, 5, "decisions")
        wait_until(lambda: set(governed.told[-1][0].point.fps) == set(names), 5, f"decisions for {names}")

    governs("c")
    governed.cameras.add(
        {"name": "d", "url": "synthetic:?width=32&height=32&fps=50", "model": ["m", "n"], "min_fps": 2}
    )
    governs("c", "d")
    assert set(governed.governing.operating().estimates) >= {"camera c", "camera d"}
    governed.cameras.change("d", {"fps": 3, "priority": 4, "model": "n"})
    governs("c", "d")
    governed.cameras.remove("c")
    governs("d")
    governed.cameras.remove("d")
    governs()
    governed.cameras.reset(None)
    governs("c")


def test_it_begins_with_the_least_where_nobody_knows_what_more_takes(made: list[Governed], folder: Path) -> None:
    governed = make(made, folder, "power_w = 10")
    assert governed.held() is None
    governed.governing.begin()
    assert governed.held() == 1.0
    assert governed.variants() == LIGHT
    assert governed.speed() < 0.5
    governed.governing.close()
    assert governed.speed() == 1.0


def test_a_latency_alone_begins_with_everything(made: list[Governed], folder: Path) -> None:
    governed = make(made, folder, "latency_p99_ms = 80")
    governed.governing.begin()
    assert governed.held() is None
    assert governed.variants() == {"m": "large", "n": "fp32"}


def test_without_a_budget_it_decides_nothing_and_one_that_comes_is_held(made: list[Governed], folder: Path) -> None:
    governed = make(made, folder)
    governed.governing.begin()
    governed.governing.start()
    tick_ns = governed.governing.tick_ns
    wait_until(lambda: governed.governing.tick_ns > tick_ns, what="it has looked twice")
    assert (governed.told, governed.governing.operating().decision) == ([], None)
    assert governed.governing.alarms() == []
    assert governed.variants()["m"] == "large"
    governed.budget.set(SetBudgetArgs(power_w=12.0))
    wait_until(lambda: governed.told, what="a decision")
    assert governed.told[0][1] == Budget(power_w=12.0)
    assert governed.governing.operating().budget == Budget(power_w=12.0)
    # and taken away again everything is as it was
    governed.budget.set(SetBudgetArgs(power_w=None))
    wait_until(lambda: governed.told[-1][0].state == "off", what="off")
    wait_until(lambda: governed.variants()["m"] == "large", what="the wanted variant")
    assert governed.held() is None
    assert governed.speed() == 1.0


def test_what_a_configuration_read_again_has_changed_is_put_back(
    made: list[Governed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = OperatingPoint(LIGHT, {"c": 7.0}, {"m": 1, "n": 1}, {"m": 3.0, "n": 20.0})
    decided = Decision(point, "derating", "for the test", {}, changed=False)
    monkeypatch.setattr(Controller, "step", lambda *_: decided)
    governed = make(made, folder, "power_w = 10")
    governed.governing.start()
    wait_until(lambda: governed.desk._timeout_ns == 3_000_000, what="the tuner's time-out")
    assert governed.device.sighup(f"{MODEL}\nbatch_timeout_ms = 50") == []
    wait_until(lambda: governed.desk._timeout_ns == 3_000_000, what="the tuner's time-out again")
    assert governed.held() == 7.0
    # it may have all of the engine's places, so a larger engine's as well
    assert governed.desk._limit == NO_LIMIT


def test_a_variant_that_could_not_be_changed_is_changed_later(
    made: list[Governed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is nothing left to hold: nobody would look again."""
    governed = make(made, folder, "power_w = 10")
    governed.governing.begin()
    assert governed.variants() == LIGHT
    prefer, refusals = governed.device.keeper.prefer, [False, False]
    monkeypatch.setattr(governed.device.keeper, "prefer", lambda *asked: refusals.pop() if refusals else prefer(*asked))
    governed.budget.apply(None)
    governed.governing.start()
    wait_until(lambda: governed.variants()["m"] == "large", what="the wanted variant")
    assert refusals == []


def test_while_an_engine_is_built_the_safe_point_is_kept_to_and_then_left(made: list[Governed], folder: Path) -> None:
    (governed := Governed(folder, "power_w = 15.0")).governing.begin()
    made.append(governed)
    governed.governing.start()

    def state() -> str | None:
        return governed.told[-1][0].state if governed.told else None

    wait_until(lambda: state() not in (None, "safe"), 20, "an ordinary decision")
    governed.hold = "an engine for this device is being built (tiny a)"
    wait_until(lambda: state() == "safe", 10, "the safe point")
    held = governed.told[-1][0]
    assert held.because == governed.hold
    wait_until(
        lambda: f"the safe point is in force: {governed.hold}" in governed.governing.alarms(), 5, "the reason is told"
    )
    governed.hold = None
    wait_until(lambda: state() != "safe", 20, "it goes on")


def test_a_lease_that_nobody_renews_lapses_to_the_safe_point(
    made: list[Governed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, free = threading.Event(), threading.Event()
    point = OperatingPoint({"m": "large", "n": "fp32"}, {"c": None}, {"m": 1, "n": 1}, {"m": 20.0, "n": 20.0})

    def step(*_: object) -> Decision:
        if hang.is_set():
            free.wait(30)
        return Decision(point, "holding", "for the test", {}, changed=False)

    monkeypatch.setattr(Controller, "step", step)
    governed = make(made, folder, "power_w = 10")
    governing = governed.governing
    governing.start()
    wait_until(lambda: governed.told, what="a decision")
    governing.check()
    assert governing.alarms() == []
    hang.set()
    tick_ns = governing.tick_ns

    def lapsed() -> bool:
        governing.check()
        return bool(governing.alarms())

    wait_until(lapsed, 5, "the lapse")
    assert (time.monotonic_ns() - tick_ns) / 1e9 < 3
    assert governing.alarms() == ["the safe point is in force: the governor does not answer"]
    operating = governing.operating()
    assert operating.decision is not None
    assert (operating.decision.state, operating.decision.point.fps) == ("safe", {"c": 1.0})
    assert governed.held() == 1.0
    assert governed.variants() == LIGHT
    told = len(governed.told)
    hang.clear()
    free.set()
    wait_until(lambda: len(governed.told) > told and governing.alarms() == [], what="it is governed again")
    wait_until(lambda: governed.variants()["m"] == "large", what="the wanted variant")


def test_equal_trouble_gives_equal_words_without_numbers(made: list[Governed], folder: Path) -> None:
    governed = make(made, folder, "power_w = 10\ntemperature_c = 85", faults=(Fault("missing", 0.0, 1e6),))
    governed.governing.start()
    seen: set[str] = set()

    def looked_enough() -> bool:
        seen.update(governed.governing.alarms())
        return len(governed.told) > 6

    wait_until(looked_enough, what="looks enough")
    assert seen == {"the safe point is in force: no reading of power and temperature"}
    assert not re.search(r"\d", "".join(seen))


# --- the profile

DIGEST = "sha256:" + "0" * 64


def profile(**fields: Any) -> Profile:
    point = ProfilePoint(
        engine=DIGEST, bundle=DIGEST, variant="fp32", backend="onnxruntime", lanes=1, batch=1, fps=30.0,
        busy_s=0.03, joules_per_frame=0.1, p99_ms=40.0,
    )  # fmt: skip
    given = {"module": "orin-nano-8gb", "mode": "simulated", "t_utc": "2026-01-31T12:00:00Z", **fields}
    return Profile.model_validate({"schema": "edge.profile/1", "point": (point,), **given})


@pytest.fixture
def machine() -> Machine:
    return simulated("orin-nano-8gb", Pipeline(lambda _: None), on_switch=lambda _: None, on_death=lambda *_: None)


def test_the_profile_in_the_documents_fits_the_machine_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    found = re.search(r'```text\n(schema = "edge.profile/1".*?)```', page, re.DOTALL)
    assert found is not None
    shown = parse_profile(found[1], "operations.md")
    assert set(shown.versions) == {"edge_runtime", "onnxruntime"}
    device = Machine(shown.module, shown.mode, Unavailable("for the test"), IdlePower(), None)
    monkeypatch.setattr("edge_runtime.app.machine.version", lambda _: shown.versions["onnxruntime"])
    monkeypatch.setattr("edge_runtime.app.machine.__version__", shown.versions["edge_runtime"])
    assert device.lacks(shown) is None
    assert device.lacks(shown.model_copy(update={"mode": "25W"})) is not None
    monkeypatch.setattr("edge_runtime.app.machine.__version__", "0.0.9")
    assert device.lacks(shown) == f"it was measured with edge_runtime {shown.versions['edge_runtime']}, this has 0.0.9"


def test_a_profile_without_joules_still_tells_how_long_a_frame_takes(made: list[Governed], folder: Path) -> None:
    governed = make(made, folder, "power_w = 10")
    engine = next(each.info.digest for each in governed.device.ladder() if each.info.variant == "middle")
    point = ProfilePoint(
        engine=engine, bundle=DIGEST, variant="middle", backend="onnxruntime", lanes=1, batch=1, fps=30.0, busy_s=0.5,
        p99_ms=40.0,
    )  # fmt: skip
    governing = governed.governing
    governing._profile = profile().model_copy(update={"points": (point,)})
    found = {each.name: (each.busy_s, each.joules) for each in governing._site(()).models[0].variants}
    assert found == {"large": (0.03, None), "middle": (0.5, None), "small": (0.01, None)}


def test_a_profile_is_used_where_it_fits_and_trouble_where_it_does_not(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "store").mkdir()
    keep = tmp_path / "store" / "profile.toml"
    text = (
        '[device]\nstore = "store"\n[[camera]]\nname = "c"\nurl = "synthetic:"\n[[model]]\nname = "m"\nbundle = "b"\n'
    )
    configured = parse_config(text, "config.toml", tmp_path)
    assert find_profile(configured, machine) == (None, None)
    save_profile(keep, profile())
    found, trouble = find_profile(configured, machine)
    assert (found, trouble) == (profile(), None)
    save_profile(keep, profile(module="orin-nx-16gb"))
    found, trouble = find_profile(configured, machine)
    assert found is None
    assert "it was measured on orin-nx-16gb, this is orin-nano-8gb" in str(trouble)
    keep.write_text("nonsense\n= 3", encoding="utf-8")
    found, trouble = find_profile(configured, machine)
    assert found is None
    assert str(keep) in str(trouble)
    assert "\n" not in str(trouble)
