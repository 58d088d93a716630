"""Watts and degrees from jetson-stats: its client and the service behind /run/jtop.sock. The only door to `jtop`.

Seen in the client of 4.2.12, 4.3.2 and 7.2.2, and dealt with here:
- `start` never returns while the service's worker is dead, and its object can be started once: ManagerWire bounds it,
  and every attempt makes a new object.
- A service that hangs has its last data read again and again: a reading counts only once `uptime` has moved.
- The module's input rail (VDD_IN, POM_5V_IN, VIN) stands in `power["tot"]` under its name and not in `power["rail"]`;
  without a name `tot` is a sum of all rails, which is no module power.
- Making an object looks for libraries by running a dozen programs; importing 7.x sets multiprocessing's start method.
"""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edge_runtime.hardware.findings import Findings
from edge_runtime.hardware.manager_wire import ManagerWire
from edge_runtime.hardware.modules import Module, Unknown
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.retry import Retry
from edge_runtime.records.power import DeviceReading
from edge_runtime.threads import set_os_thread_name

STALE_PERIODS = 3.0
STALE_S = 1.0
"""No new data for this many periods, and at least so long, is no reading."""

START_S = 5.0
"""The service has to have answered everything the client asks at its start within this time."""

_WAIT_PERIODS = 3.0  # the client lets the service hold back an answer for so long
_WAIT_MARGIN_S = 2.0
_JOIN_S = 1.0
_MAX_PERIOD_S = 60.0
_RAIL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_KHZ, _MHZ = 1e3, 1e6
_LEAST_KHZ = 10_000  # no GPU is slower than 10 MHz, none faster than 10 GHz: below this it is in MHz
_REMEDY_LOOK = "look at: systemctl status jtop.service"
_REMEDY_RESTART = "systemctl restart jtop.service"


class JtopSource:
    """A SensorSource that asks jetson-stats' service; connected by the first `read`, again when it is lost.

    `period_s`: the rate that the service is asked for. Its first client decides: the property tells the real one.
    """

    def __init__(self, module: Module | Unknown, *, period_s: float = 1.0) -> None:
        self._module = module
        self._asked_s = self._period_s = period_s
        self._reading = threading.Lock()
        self._closed = False
        self._session: _Session | None = None
        self._retry = Retry()
        self._lost: tuple[str, str | None] = ("", None)

    @property
    def name(self) -> str:
        return "jtop"

    @property
    def rails(self) -> tuple[str, ...]:
        return self._module.rails

    @property
    def quantum_w(self) -> float | None:
        return self._module.quantum_w

    @property
    def period_s(self) -> float:
        return self._period_s

    def read(self) -> DeviceReading:
        """Waits for the service's next data, at most three periods or 1 s, and for a connection at most START_S.

        Raises SensorError where jetson-stats is not installed, the service is not there, does not let us in, is of
        another version, has hung or died (it is connected again after a while), and after `close`.
        """
        with self._reading:
            if self._closed or self._retry.wait_s > 0:
                raise self._unavailable()
            try:
                session = self._session or self._connect()
                found, t_ns = session.next(max(STALE_PERIODS * self._period_s, STALE_S))
            except SensorError as error:
                self._end()
                self._retry.failed()
                self._lost = error.message, error.remedy
                raise self._unavailable() from error.__cause__
            self._retry.up()
            return found.reading(self._module, t_ns)

    def close(self) -> None:
        """Leave the service; a `read` that waits for it ends at once. Idempotent, for any thread."""
        self._closed = True
        session = self._session
        if session is not None:
            session.cut()
        with self._reading:
            self._end()

    def _connect(self) -> _Session:
        self._session = session = _Session(_library(), self._asked_s)
        if self._closed:  # between the check in read and now: nobody could cut it
            session.cut()
        session.start()
        self._period_s = session.period_s
        return session

    def _unavailable(self) -> SensorError:
        if self._closed:
            return SensorError("it is closed", where="jtop")
        reason, remedy = self._lost
        return SensorError(
            f"{reason}; it is tried again in {self._retry.wait_s:.1f} s", where="jtop", remedy=remedy, retryable=True
        )

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end()


class _Session:
    """One client object: its connections, its reader thread, and the newest data that thread has got."""

    def __init__(self, library: Any, period_s: float) -> None:
        self.period_s = period_s
        self._socket = Path(library.service.JTOP_PIPE)
        self._wire = ManagerWire(start_s=START_S, wait_s=_WAIT_PERIODS * period_s + _WAIT_MARGIN_S)
        self._changed = threading.Condition()
        self._uptime: object = None
        self._new: tuple[Findings, int] | None = None
        self._over = False
        try:
            self._client = _client(library, period_s, self._finish)
        except OSError as error:  # its semaphores, where /dev/shm cannot be written
            raise SensorError(f"its client cannot be made: {error}") from error
        self._client.name = "jtop"
        self._client.attach(self._take)
        self._wire.adopt(self._client._broadcaster)

    def start(self) -> None:
        """Raises SensorError with the reason."""
        try:
            self._client.start()
        except Exception as error:  # foreign code on foreign data: anything may be missing in it
            raise _refusal(error, self._socket) from error
        self._wire.settle()
        told_s = self._client.interval
        if isinstance(told_s, int | float) and 0 < told_s <= _MAX_PERIOD_S:
            self.period_s = float(told_s)

    def next(self, wait_s: float) -> tuple[Findings, int]:
        """What is new since the last call, with the monotonic time at which it came. Raises SensorError."""
        with self._changed:
            self._changed.wait_for(lambda: self._new is not None or self._over, wait_s)
            new, self._new = self._new, None
            if new is not None:
                return new
            over, uptime = self._over, self._uptime
        if over:
            try:
                self._client.ok(spin=True)
            except Exception as error:  # whatever the reader thread died of
                raise SensorError(f"the service was lost: {_text(error)}") from error
            raise SensorError("the service was lost")
        if uptime is None:
            raise SensorError("the service tells no uptime: whether its data is new cannot be known")
        raise SensorError(f"no new data for {wait_s:.1f} s: the service hangs", remedy=_REMEDY_RESTART)

    def cut(self) -> None:
        """End whatever waits for the service. For any thread."""
        self._wire.cut()
        self._finish()

    def end(self) -> None:
        """Leave the service, and wait for the reader thread."""
        self.cut()
        self._client.detach(self._take)
        self._client.close()
        if self._client.is_alive():
            self._client.join(_JOIN_S)
        if not self._client.is_alive():
            self._wire.close()

    def _take(self, client: Any) -> None:
        """On the reader thread, with each data it gets, new or not. The first may be of any age: it is passed over."""
        t_ns = time.monotonic_ns()
        uptime = _told(client, "uptime")
        if uptime == self._uptime:
            return
        found = None if self._uptime is None else findings(client)
        with self._changed:
            self._uptime = uptime
            if found is not None:
                self._new = found, t_ns
                self._changed.notify_all()

    def _finish(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


def _library() -> Any:
    """The package `jtop`. Raises SensorError where it is not installed."""
    method = multiprocessing.get_start_method(allow_none=True)
    try:
        import jtop
        import jtop.service
    except ImportError as error:
        raise SensorError(
            f"jetson-stats cannot be imported: {error}",
            remedy="install the version that the device's jtop.service has: pip install jetson-stats==VERSION",
        ) from error
    finally:
        multiprocessing.set_start_method(method, force=True)
    return jtop


def _client(library: Any, period_s: float, on_end: Callable[[], None]) -> Any:
    class Client(library.jtop):  # type: ignore[misc]
        """jetson-stats' client, which tells when its thread ends."""

        def _load_jetson_libraries(self) -> None:
            """Not asked for here, and dear."""

        def run(self) -> None:
            set_os_thread_name("jtop")
            try:
                super().run()
            finally:
                on_end()

    return Client(interval=period_s)


def _refusal(error: Exception, path: Path) -> SensorError:
    """Why the client could not start, from what it raised and what it was handling then."""
    cause = error.__context__ or error
    text, remedy = _text(error), _REMEDY_LOOK
    if isinstance(cause, PermissionError):
        text, remedy = f"no permission for {path}", "add the user to the group jtop, then log in or start again"
    elif path.is_dir():
        text = f"{path} is a folder and no socket: it was mounted into this container while there was no service"
        remedy = "start jtop.service on the host, then this container anew"
    elif isinstance(cause, FileNotFoundError):
        text, remedy = f"the service is not there: no {path}", "start jtop.service; in a container, mount its socket"
    elif isinstance(cause, ConnectionRefusedError):
        text = f"nobody answers at {path}: the service has ended, or a container has the socket of an earlier one"
        remedy = "start jtop.service, then the container anew"
    elif isinstance(cause, TimeoutError):
        text, remedy = f"the service does not answer within {START_S:g} s: it hangs", _REMEDY_RESTART
    elif text.startswith("Mismatch version"):
        text, remedy = (
            text.partition(" Please run")[0],
            "install the same version of jetson-stats here as on the device",
        )
    return SensorError(text, remedy=remedy)


def _text(error: BaseException) -> str:
    """One line."""
    text = " ".join(str(error).split())
    if isinstance(error, LookupError | TypeError | AttributeError):
        return f"its client cannot use the service's data: {type(error).__name__}: {text}"
    return text or type(error).__name__


def findings(client: Any) -> Findings:
    """What the client's properties say; each may be missing, None or odd."""
    found = Findings()
    power = _mapping(_told(client, "power"))
    rails = dict(_mapping(power.get("rail")))
    total = _mapping(power.get("tot"))
    if isinstance(total.get("name"), str):
        rails[total["name"]] = total
    for name, rail in rails.items():
        values = _mapping(rail)
        if _RAIL_NAME.fullmatch(str(name)):  # not the USB supplies that 4.x lists as rails: "0-00081"
            found.add_rail(name, values.get("power") if values.get("online", True) else "offline")
    for name, zone in _mapping(_told(client, "temperature")).items():
        values = _mapping(zone)
        found.add_zone(str(name), values.get("temp") if values.get("online", True) else "offline")
    _add_gpu(found, _mapping(_told(client, "gpu")))
    _add_fan(found, _mapping(_told(client, "fan")))
    mode = _told(_told(client, "nvpmodel"), "name")
    if isinstance(mode, str):
        found.mode = mode
    else:
        found.reasons["mode"] = "the service tells none"
    return found


def _told(thing: Any, name: str) -> Any:
    """A property of the client; None where the service's data lacks what it is made from."""
    try:
        return getattr(thing, name)
    except (LookupError, TypeError, AttributeError):
        return None


def _add_gpu(found: Findings, gpus: Mapping[str, Any]) -> None:
    gpu = _mapping(next(iter(gpus.values()), None))
    load, clock = _mapping(gpu.get("status")).get("load"), _mapping(gpu.get("freq")).get("cur")
    if gpu.get("power_control") == "nvml" and not clock:
        # 7.x puts 0 for what NVML does not tell
        load = clock = None
    if isinstance(clock, int | float):
        clock *= _MHZ if clock < _LEAST_KHZ else _KHZ
    found.add_gpu(load, clock)


def _add_fan(found: Findings, fans: Mapping[str, Any]) -> None:
    speeds = [speed for fan in fans.values() for speed in _list(_mapping(fan).get("speed")) if _is_percent(speed)]
    if speeds:
        found.fan = max(speeds) / 100
    else:
        found.reasons["fan"] = "the service tells none"


def _is_percent(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 100


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    """`value` where it is a mapping, of its own kind too; else an empty one."""
    if isinstance(value, Mapping):
        return value
    try:
        return dict(value.items())  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return {}
