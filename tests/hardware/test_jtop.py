"""jetson-stats: its real client against a service that is absent, closed, of another version, hung, dead and back."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jtop.service
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.hardware.jtop import JtopSource, findings
from edge_runtime.hardware.modules import MODULES, Module
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.sysfs_power import MAX_RAIL_W
from edge_runtime.hardware.sysfs_thermal import MAX_C, MIN_C
from edge_runtime.records.power import DeviceReading
from tests.awaiting import wait_until
from tests.hardware.jtop_service import AGX_ORIN, Service, nano

MakeSource = Callable[..., JtopSource]


def module_of(name: str) -> Module:
    return next(module for module in MODULES if module.name == name)


@pytest.fixture
def make_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSource]:
    """Makes sources that look for the service in the test's folder; they have to close at once."""
    monkeypatch.setattr(jtop.service, "JTOP_PIPE", str(tmp_path / "jtop.sock"))
    monkeypatch.setattr("edge_runtime.hardware.jtop.STALE_S", 0.4)
    made: list[JtopSource] = []

    def make(module: str = "agx-orin-64gb", period_s: float = 0.05) -> JtopSource:
        made.append(JtopSource(module_of(module), period_s=period_s))
        return made[-1]

    yield make
    for source in made:
        t0 = time.monotonic()
        source.close()
        assert time.monotonic() - t0 < 1.0


def read_until(source: JtopSource, wanted: Callable[[DeviceReading | str], object], timeout_s: float = 40.0) -> Any:
    """The first reading, or reason for there being none, that is wanted. A lost service is tried after up to 30 s."""
    got: list[DeviceReading | str] = []

    def came() -> object:
        try:
            got.append(source.read())
        except SensorError as error:
            got.append(str(error))
        return wanted(got[-1])

    try:
        wait_until(came, timeout_s, "what was wanted")
    except AssertionError as error:
        raise AssertionError(f"{error}; the last that came: {got[-1]}") from None
    return got[-1]


def test_an_agx_orin_is_read_truly(tmp_path: Path, make_source: MakeSource) -> None:
    with Service(tmp_path, AGX_ORIN):
        source = make_source()
        reading = source.read()
        assert reading.watts == pytest.approx(2.340 + 0.390 + 4.025)  # VDDQ is behind VIN_SYS_5V0
        assert reading.rails_w["VDDQ_VDD2_1V8AO"] == pytest.approx(0.301)
        assert set(reading.rails_w) == {"VDDQ_VDD2_1V8AO", "VDD_CPU_CV", "VDD_GPU_SOC", "VIN_SYS_5V0"}
        assert reading.tj_c == 44.343
        assert dict(reading.zones_c) == {"cpu": 44.562, "tboard": 52.0, "tj": 44.343, "nvme composite": 61.85}
        assert {"zone gpu", "zone cv0"} <= set(reading.reasons)
        assert (reading.gpu_load, reading.gpu_hz) == (0.375, 816e6)
        assert (reading.fan, reading.mode) == (0.25, "MODE_30W")
        assert (source.name, source.rails) == ("jtop", ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"))


def test_the_input_rail_that_stands_for_the_total_is_found(tmp_path: Path, make_source: MakeSource) -> None:
    with Service(tmp_path, nano(4654)):
        reading = make_source("orin-nano-8gb").read()
        assert reading.watts == 4.654
        assert dict(reading.rails_w) == {"VDD_CPU_GPU_CV": 0.56, "VDD_SOC": 1.484, "VDD_IN": 4.654}
        assert reading.tj_c == 50.218


def test_readings_are_new_ones_at_the_services_rate(tmp_path: Path, make_source: MakeSource) -> None:
    with Service(tmp_path, AGX_ORIN, interval=0.1):
        source = make_source()
        times = [source.read().t_ns for _ in range(5)]
        assert source.period_s == 0.1
    assert all(b - a > 30_000_000 for a, b in itertools.pairwise(times))


def test_what_the_service_does_not_have_is_missing_with_its_reason(tmp_path: Path, make_source: MakeSource) -> None:
    data: dict[str, Any] = {"power": {}, "temperature": {}, "gpu": {}, "fan": {}, "mem": {}}
    with Service(tmp_path, data):
        reading = make_source().read()
        assert (reading.watts, reading.tj_c, reading.gpu_load, reading.gpu_hz, reading.fan, reading.mode) == (None,) * 6
        assert {"power", "tj", "gpu", "fan", "mode"} <= set(reading.reasons)


@pytest.mark.parametrize(
    ("data", "scenario", "reason"),
    [
        ({"power": {}, "fan": {}, "mem": {}}, {}, "KeyError: 'gpu'"),
        (AGX_ORIN, {"uptime": None}, "tells no uptime"),
        (AGX_ORIN, {"version": "4.2.1"}, r"Mismatch version jtop service: \[4\.2\.1\].*install the same version"),
        ({}, {"uptime": None}, "Error connection"),
    ],
    ids=["a key that its client needs", "no uptime", "another version", "nothing"],
)
def test_a_service_that_cannot_be_used_is_a_reason(
    tmp_path: Path, make_source: MakeSource, data: dict[str, Any], scenario: dict[str, Any], reason: str
) -> None:
    with Service(tmp_path, data, **scenario), pytest.raises(SensorError, match=reason):
        make_source().read()


def test_without_a_service_there_is_a_reason_and_it_is_tried_again(tmp_path: Path, make_source: MakeSource) -> None:
    source = make_source()
    with pytest.raises(SensorError, match=r"the service is not there: no .*jtop\.sock; it is tried again in 0\.5 s"):
        source.read()
    with pytest.raises(SensorError, match="the service is not there"):
        source.read()
    with Service(tmp_path, AGX_ORIN):
        read_until(source, lambda got: isinstance(got, DeviceReading))


def test_a_socket_that_is_a_folder_is_told(tmp_path: Path, make_source: MakeSource) -> None:
    (tmp_path / "jtop.sock").mkdir()
    with pytest.raises(SensorError, match=r"is a folder and no socket.*then this container anew"):
        make_source().read()


def test_a_socket_that_nobody_listens_to_is_told(tmp_path: Path, make_source: MakeSource) -> None:
    with Service(tmp_path, AGX_ORIN) as service:
        service.kill()
        with pytest.raises(SensorError, match=r"nobody answers at .*the socket of an earlier one"):
            make_source().read()


def test_a_socket_that_may_not_be_used_is_told(tmp_path: Path, make_source: MakeSource) -> None:
    source = make_source()
    with Service(tmp_path, AGX_ORIN) as service:
        service.socket.chmod(0o600)
        tmp_path.chmod(0o755)
        user = os.geteuid()
        if user == 0:
            for folder in (tmp_path, *tmp_path.parents[:2]):
                folder.chmod(0o755)
            os.seteuid(65534)  # root may use any
        else:
            service.socket.chmod(0)
        try:
            with pytest.raises(SensorError, match=r"no permission for .*group jtop"):
                source.read()
        finally:
            os.seteuid(user)


def test_a_hung_service_gives_no_old_data(tmp_path: Path, make_source: MakeSource) -> None:
    with Service(tmp_path, AGX_ORIN) as service:
        source = make_source()
        source.read()
        service.say({"interval": 0.05, "data": AGX_ORIN, "frozen_after": 0})
        said = read_until(source, lambda got: isinstance(got, str))
        assert "no new data for 0.4 s: the service hangs" in said
        # it is connected again, and has the old data yet: no reading
        wait_until(lambda: source._retry.wait_s == 0)
        with pytest.raises(SensorError, match="no new data"):
            source.read()
        service.say({"interval": 0.05, "data": AGX_ORIN})
        read_until(source, lambda got: isinstance(got, DeviceReading))


def test_a_service_that_dies_and_starts_again_is_connected_again(tmp_path: Path, make_source: MakeSource) -> None:
    with Service(tmp_path, AGX_ORIN) as service:
        source = make_source()
        source.read()
        service.kill()
        t0 = time.monotonic()
        said = read_until(source, lambda got: isinstance(got, str))
        assert time.monotonic() - t0 < 1.0
        assert "the service was lost" in said
        service.start()
        read_until(source, lambda got: isinstance(got, DeviceReading))
    assert [thread.name for thread in threading.enumerate() if thread.name == "jtop"] != ["jtop", "jtop"]


def test_a_service_that_is_stopped_holds_up_neither_a_reading_nor_the_close(
    tmp_path: Path, make_source: MakeSource
) -> None:
    with Service(tmp_path, AGX_ORIN) as service:
        source = make_source()
        source.read()
        service.signal(signal.SIGSTOP)
        t0 = time.monotonic()
        read_until(source, lambda got: isinstance(got, str))
        assert time.monotonic() - t0 < 2.0
        service.signal(signal.SIGCONT)
        read_until(source, lambda got: isinstance(got, DeviceReading))


@pytest.mark.parametrize("how", ["stopped", "mute"])
def test_a_service_that_does_not_answer_the_client_is_given_up(
    tmp_path: Path, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("edge_runtime.hardware.jtop.START_S", 0.5)
    with Service(tmp_path, AGX_ORIN, mute=how == "mute") as service:
        if how == "stopped":
            service.signal(signal.SIGSTOP)
        t0 = time.monotonic()
        with pytest.raises(SensorError, match=r"does not answer within 0\.5 s"):
            make_source().read()
        assert 0.4 < time.monotonic() - t0 < 2.0


@pytest.mark.parametrize("connected", [False, True])
def test_close_ends_a_read_that_waits(tmp_path: Path, make_source: MakeSource, connected: bool) -> None:
    with Service(tmp_path, AGX_ORIN) as service:
        source = make_source(period_s=2.0 if connected else 0.05)
        if connected:
            source.read()
            service.say({"interval": 30.0, "data": AGX_ORIN})
        service.signal(signal.SIGSTOP)
        said: list[str] = []

        def read() -> None:
            said.append(read_until(source, lambda got: got == "jtop: it is closed", 30.0))

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: source._reading.locked())
        t0 = time.monotonic()
        source.close()
        thread.join(5.0)
        assert time.monotonic() - t0 < 1.0
        assert said == ["jtop: it is closed"]
        source.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.full)])
def test_nothing_is_left_after_many_connections(tmp_path: Path, make_source: MakeSource, count: int) -> None:
    with Service(tmp_path, AGX_ORIN):
        make_source().read()
        before = open_files()
        for _ in range(count):
            source = make_source()
            source.read()
            source.close()
        wait_until(lambda: open_files() <= before, what="the end of all connections")
        assert not multiprocessing.active_children()


def test_neither_the_start_method_nor_a_missing_package_is_anybodys_trouble() -> None:
    program = """
import multiprocessing, sys
from edge_runtime.hardware.jtop import JtopSource
from edge_runtime.hardware.modules import MODULES
from edge_runtime.hardware.protocol import SensorError
assert "jtop" not in sys.modules
def reason():
    source = JtopSource(MODULES[0])
    try:
        source.read()
    except SensorError as error:
        return str(error)
    finally:
        source.close()
multiprocessing.set_start_method("spawn")
reason()
assert "jtop" in sys.modules
assert multiprocessing.get_start_method() == "spawn"
for name in [name for name in sys.modules if name.partition(".")[0] == "jtop"]:
    del sys.modules[name]
sys.modules["jtop"] = None
print(reason())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "jetson-stats cannot be imported" in done.stdout
    assert "pip install" in done.stdout


words = st.text(alphabet="aV_0-@ ", max_size=5)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.just(-256),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rail", "tot", "name", "power", "online", "temp", "tj", "VDD_IN", "load", "cur", "speed"])
            | words,
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("power", "temperature", "gpu", "fan", "nvpmodel"), anything)))
def test_any_data_gives_sane_values(data: dict[str, Any]) -> None:
    found = findings(SimpleNamespace(**data))
    assert all(0 <= watts <= MAX_RAIL_W for watts in found.rails_w.values())
    assert all(MIN_C <= temp_c <= MAX_C for temp_c in found.zones_c.values())
    assert found.gpu_load is None or 0 <= found.gpu_load <= 1
    assert found.gpu_hz is None or (math.isfinite(found.gpu_hz) and found.gpu_hz >= 0)
    assert found.fan is None or 0 <= found.fan <= 1
    found.reading(module_of("orin-nano-8gb"), 0)


@pytest.mark.parametrize(
    ("status", "freq", "control", "load", "hz"),
    [
        ({"load": 37.5}, {"cur": 816000}, "auto", 0.375, 816e6),
        ({"load": 37.5}, {"cur": 1574}, "nvml", 0.375, 1574e6),  # 7.x hands on NVML's MHz
        ({"load": 0.0}, {"cur": 0}, "nvml", None, None),  # what 7.x puts for "not told"
        ({"load": 12.0}, {}, "auto", 0.12, None),
        ({}, {"cur": 306000}, "auto", None, 306e6),
    ],
)
def test_the_gpus_load_and_clock(
    status: dict[str, float], freq: dict[str, int], control: str, load: float | None, hz: float | None
) -> None:
    found = findings(SimpleNamespace(gpu={"gpu": {"status": status, "freq": freq, "power_control": control}}))
    assert (found.gpu_load, found.gpu_hz) == (load, hz)
