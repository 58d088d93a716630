"""Faults that come while the files are being read, and whatever bytes stand in them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.sysfs import FIND_S, SysfsSource
from edge_runtime.hardware.sysfs_power import FROZEN_READINGS, FROZEN_S
from edge_runtime.records.power import DeviceReading
from tests.hardware.trees import HandClock, Tree, build

WATTS = 4.984 * 1.064


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return build(tmp_path, "orin-nx-16gb")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def source(tree: Tree, clock: HandClock) -> Iterator[SysfsSource]:
    source = SysfsSource(tree.root, clock=clock)
    yield source
    source.close()


class FailingReads:
    """pread(2) that fails for chosen files, as a driver's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[Path, int] = {}
        self.reads = 0
        self._pread = os.pread
        monkeypatch.setattr(os, "pread", self)

    def __call__(self, fd: int, length: int, offset: int) -> bytes:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path in self.errors:
            self.reads += 1
            raise OSError(self.errors[path], os.strerror(self.errors[path]))
        return self._pread(fd, length, offset)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_values_are_read_anew_each_time(tree: Tree, source: SysfsSource) -> None:
    assert source.read().watts == pytest.approx(WATTS)
    tree.rail("VDD_IN", 5000, 3000)
    tree.zone("tj", 71.25)
    read = source.read()
    assert (read.watts, read.tj_c) == (15.0, 71.25)


def test_a_chip_that_comes_back_under_another_number(tree: Tree, source: SysfsSource, clock: HandClock) -> None:
    assert source.read().watts == pytest.approx(WATTS)
    clock.forward(2.0)
    tree.renumber("1-0040", 17)
    tree.rail("VDD_IN", 5000, 2000)
    # within the same reading
    assert source.read().watts == 10.0


def test_a_chip_that_goes_and_comes_back_later(tree: Tree, source: SysfsSource, clock: HandClock) -> None:
    source.read()
    bus = tree.root / "sys/bus/i2c/devices/1-0040"
    target = bus.readlink()
    chip = (tree.root / "sys/devices/platform/i2c/1-0040").rename(tree.root / "away")
    bus.unlink()
    clock.forward(FIND_S)
    read = source.read()
    assert read.watts is None
    assert read.reasons["power"] == "no power monitor on the I2C bus"
    assert read.tj_c == 48.9
    chip.rename(tree.root / "sys/devices/platform/i2c/1-0040")
    bus.symlink_to(target)
    clock.forward(FIND_S)
    assert source.read().watts == pytest.approx(WATTS)


def test_after_a_loss_it_looks_again_every_second(
    tree: Tree, source: SysfsSource, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.read()
    failing = FailingReads(monkeypatch)
    files = [tree.rail_file("VDD_IN"), tree.rail_file("VDD_CPU_GPU_CV"), tree.rail_file("VDD_SOC")]
    failing.errors = {file.resolve(): errno.ENODEV for file in files}
    clock.forward(2.0)
    assert "ENODEV" in source.read().reasons["rail VDD_IN"]
    failing.errors = {}
    tree.renumber("1-0040", 9)
    clock.forward(1.0)
    assert source.read().watts == pytest.approx(WATTS)


def test_a_file_that_is_replaced_is_read_from_its_new_place(tree: Tree, source: SysfsSource) -> None:
    source.read()
    file = tree.rail_file("VDD_IN")
    other = file.with_name("other")
    other.write_text("10000\n")
    other.replace(file)
    assert source.read().watts == pytest.approx(10.0 * 1.064)


@pytest.mark.parametrize("code", [errno.EIO, errno.EAGAIN, errno.EREMOTEIO, errno.ETIMEDOUT])
def test_a_failing_rail_is_back_as_soon_as_it_answers(
    tree: Tree, source: SysfsSource, clock: HandClock, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    assert source.read().watts is not None
    failing = FailingReads(monkeypatch)
    failing.errors[tree.rail_file("VDD_IN").resolve()] = code
    read = source.read()
    assert read.watts is None
    assert errno.errorcode[code] in read.reasons["rail VDD_IN"]
    assert "VDD_IN is missing" in read.reasons["power"]
    assert set(read.rails_w) == {"VDD_CPU_GPU_CV", "VDD_SOC"}
    failing.errors.clear()
    assert source.read().watts == pytest.approx(WATTS)


def test_a_rail_that_keeps_failing_is_asked_less_often(
    tree: Tree, source: SysfsSource, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead chip can hold up the bus for long; the reason stays."""
    source.read()
    failing = FailingReads(monkeypatch)
    failing.errors[tree.rail_file("VDD_IN").resolve()] = errno.EIO
    for _ in range(300):
        clock.forward(0.1)
        assert "EIO" in source.read().reasons["rail VDD_IN"]
    assert failing.reads < 20
    failing.errors.clear()
    tree.rail("VDD_IN", 4984, 1072)
    clock.forward(5.0)
    assert source.read().watts is not None


def test_a_gated_zone_is_asked_every_time(tree: Tree, source: SysfsSource, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingReads(monkeypatch)
    failing.errors[(tree.zone_folder("gpu") / "temp").resolve()] = errno.EAGAIN
    for _ in range(3):
        read = source.read()
        assert read.reasons["zone gpu"] == "power-gated or busy (EAGAIN)"
        assert "gpu" not in read.zones_c
        assert read.tj_c == 48.9
    failing.errors.clear()
    assert source.read().zones_c["gpu"] == 45.9


def test_a_frozen_monitor_is_no_measurement(tree: Tree, source: SysfsSource, clock: HandClock) -> None:
    for _ in range(int(FROZEN_S * 10)):
        assert source.read().watts is not None
        clock.forward(0.1)
    read = source.read()
    assert read.watts is None
    assert "exactly the same for 30 s" in read.reasons["power"]
    assert read.rails_w == {}
    assert read.tj_c == 48.9
    # one step of one channel that is not even part of module power, and it lives
    tree.rail("VDD_SOC", 4984, 296)
    assert source.read().watts == pytest.approx(WATTS)


def test_a_quiet_board_that_moves_now_and_then_is_not_frozen(tree: Tree, source: SysfsSource, clock: HandClock) -> None:
    for n in range(1000):
        if n % 250 == 0:
            tree.rail("VDD_SOC", 4984, 288 + 8 * (n // 250 % 2))
        assert source.read().watts is not None
        clock.forward(0.1)


def test_a_failing_channel_does_not_hide_that_the_rest_is_frozen(
    tree: Tree, source: SysfsSource, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingReads(monkeypatch)
    source.read()
    for n in range(int(FROZEN_S * 10) + 1):
        clock.forward(0.1)
        failing.errors = {tree.rail_file("VDD_SOC").resolve(): errno.EAGAIN} if n % 3 == 0 else {}
        read = source.read()
    assert "frozen" in read.reasons["power"]


def test_two_readings_far_apart_are_not_frozen(source: SysfsSource, clock: HandClock) -> None:
    for _ in range(FROZEN_READINGS):
        assert source.read().watts is not None
        clock.forward(60.0)


def test_the_mode_and_trip_points_are_read_again_after_a_while(
    tree: Tree, source: SysfsSource, clock: HandClock
) -> None:
    assert source.read().mode == "15W"
    tree.write("var/lib/nvpmodel/status", "pmode:0000")
    tree.trip("cpu", 0, "passive", 40.0)
    read = source.read()
    assert (read.mode, read.throttling) == ("15W", False)
    clock.forward(FIND_S)
    read = source.read()
    assert (read.mode, read.throttling) == ("MAXN", True)


def test_over_current_is_not_lost_when_a_file_goes_in_the_same_reading(
    tree: Tree, source: SysfsSource, clock: HandClock
) -> None:
    source.read()
    clock.forward(2.0)
    tree.over_current("oc2", 24)
    tree.renumber("1-0040", 12)
    assert source.read().over_current == {"oc1": 0, "oc2": 4, "oc3": 0}


def test_everything_gone_is_an_error_that_may_pass(tree: Tree, source: SysfsSource, clock: HandClock) -> None:
    source.read()
    away = tree.root / "away"
    (tree.root / "sys").rename(away)
    clock.forward(FIND_S)
    with pytest.raises(SensorError) as raised:
        source.read()
    assert raised.value.retryable
    away.rename(tree.root / "sys")
    clock.forward(FIND_S)
    assert source.read().watts == pytest.approx(WATTS)


def test_no_file_stays_open(tree: Tree, clock: HandClock) -> None:
    before = open_files()
    source = SysfsSource(tree.root, clock=clock)
    source.read()
    opened = open_files()
    assert opened > before
    for number in range(20, 25):
        tree.renumber("1-0040", number)
        clock.forward(FIND_S)
        source.read()
        source.describe()
    assert open_files() == opened
    source.close()
    source.close()
    assert open_files() == before
    with pytest.raises(SensorError, match="closed"):
        source.read()


def test_closing_while_another_thread_reads(tree: Tree) -> None:
    before = open_files()
    source = SysfsSource(tree.root)
    reading = threading.Event()
    errors: list[str] = []

    def read() -> None:
        try:
            while True:
                source.read()
                reading.set()
        except SensorError as error:
            errors.append(error.message)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(10.0)
    source.close()
    thread.join(10.0)
    assert errors == ["closed"]
    assert open_files() == before


# ---- whatever bytes


@pytest.fixture(scope="module", params=["agx-orin-32gb", "thor", "tx2"])
def shared_tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return build(tmp_path_factory.mktemp("tree"), request.param)


NASTY = st.one_of(
    st.binary(max_size=80),
    st.integers(-(10**20), 10**20).map(lambda number: b"%d\n" % number),
    st.sampled_from(
        [b"", b"\0", b"nan", b"-0", b"1e999", b"0x10", b"1_000", "٣".encode(), b"-256000", b"1000000000", b"NC"]
    ),
)
KINDS = st.one_of(NASTY, st.sampled_from(["directory", "fifo", "loop", "device", "huge", "gone"]))


def spoil(file: Path, what: bytes | str) -> None:
    if isinstance(what, bytes):
        file.write_bytes(what)
        return
    if what == "huge":
        os.truncate(file, 1 << 40)
        return
    file.unlink()
    if what == "directory":
        file.mkdir()
    elif what == "fifo":
        os.mkfifo(file)
    elif what == "loop":
        file.symlink_to(file.name)
    elif what == "device":
        file.symlink_to("/dev/zero")


def restore(file: Path, content: bytes) -> None:
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)
    file.write_bytes(content)


def check_sane(read: DeviceReading) -> None:
    assert read.watts is None or 0 < read.watts <= 600
    assert all(0 <= watts <= 200 for watts in read.rails_w.values())
    assert read.tj_c is None or read.tj_c in read.zones_c.values()
    assert all(-40 <= celsius <= 150 for celsius in read.zones_c.values())
    assert read.gpu_load is None or 0 <= read.gpu_load <= 1
    assert read.gpu_hz is None or 0 <= read.gpu_hz <= 1e10
    assert read.fan is None or 0 <= read.fan <= 1
    assert all(count >= 0 for count in read.over_current.values())
    values = {"power": read.watts, "tj": read.tj_c, "gpu": read.gpu_load, "fan": read.fan, "mode": read.mode}
    for key, value in {**values, "throttling": read.throttling}.items():
        assert value is not None or read.reasons[key]
    assert all(read.reasons.values())


def check_readings(tree: Tree, data: st.DataObject) -> None:
    """Spoil some files before or while they are read, and put them back."""
    files = sorted(file for file in tree.root.rglob("*") if file.is_file() and not file.is_symlink())
    spoils = st.dictionaries(st.sampled_from(files), KINDS, min_size=1, max_size=6)
    chosen = data.draw(spoils)
    kept = {file: file.read_bytes() for file in chosen}
    clock = HandClock()
    source = SysfsSource(tree.root, clock=clock)
    try:
        if data.draw(st.booleans(), label="while it runs"):
            source.read()
            clock.forward(data.draw(st.sampled_from([0.1, FIND_S])))
        for file, what in chosen.items():
            spoil(file, what)
        for _ in range(2):
            try:
                check_sane(source.read())
            except SensorError:
                pass
            clock.forward(1.0)
        assert source.describe().lines()
    finally:
        source.close()
        for file, content in kept.items():
            restore(file, content)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_whatever_stands_in_the_files_a_reading_is_sane(shared_tree: Tree, data: st.DataObject) -> None:
    check_readings(shared_tree, data)


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_whatever_stands_in_the_files_a_reading_is_sane_full(shared_tree: Tree, data: st.DataObject) -> None:
    check_readings(shared_tree, data)
