"""Everything that goes to the broker and comes from it: spool, events, presence, reported, results, commands."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from edge_runtime.app.health import BrokerView, LoopView
from edge_runtime.app.identity import clock_synced
from edge_runtime.app.results import ResultPublisher
from edge_runtime.clock import Clock, utc_text
from edge_runtime.config import Config, MqttConfig
from edge_runtime.config_values import is_loopback
from edge_runtime.mqtt.events import LinkEvent
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.settings import BrokerSettings, Presence
from edge_runtime.records import messages
from edge_runtime.records.events import Reported, ReportedCamera, ReportedModel, Severity
from edge_runtime.records.frames import FrameResult
from edge_runtime.records.identity import Identity
from edge_runtime.records.status import MqttNow, SpoolLane, SpoolNow
from edge_runtime.records.window import WindowReport
from edge_runtime.telemetry.events import EventWriter
from edge_runtime.telemetry.home_assistant import FILE_NAME as HOME_ASSISTANT_FILE
from edge_runtime.telemetry.home_assistant import HomeAssistant
from edge_runtime.telemetry.spool import EVENT, TELEMETRY, Gap, Make, Spool, SpoolOptions, SpoolRow, spool_lanes
from edge_runtime.telemetry.topics import Topics

log = logging.getLogger(__name__)

MIB = 1 << 20
_LOSSES_EVERY_NS = 600_000_000_000
_LIVE_ABOVE = 20
_LIVE_S = 0.5
"""A window is sent live, too, where more wait before it than are sent in this time (ADR 17)."""
_OVER = {"spool_restored": "spool_memory", "spool_reserve_over": "spool_reserve"}
"""Which alarm of the spool is over with which."""
FLUSH_S = 0.5
CLOSE_S = 1.0
SPOOL_CLOSE_S = 0.5
SPOOL_SILENCE_S = 30.0
"""For how long the disk may take before it is an alarm."""
LOOP_SILENCE_S = {"mqtt-net": 30.0, "mqtt-pump": 15.0}
"""How long a loop may be silent. The handlers' thread runs for as long as a command does, the spool's for as long as
the disk takes: neither says anything about frames, and both have their own alarms."""
CONNECTING_S = 600.0
"""How long "mqtt-net" may be silent while there is no session: a name server that is silent takes a minute, a broker's
name may have many addresses, each of which takes seconds, and no frame waits for it."""


class Messaging:
    """The daemon's side of the broker. Without `[mqtt]` windows and events end here, and nothing is spooled."""

    def __init__(self, config: Config, identity: Identity, clock: Clock) -> None:
        self._config = config
        self._identity = identity
        self._clock = clock
        self._topics = Topics(identity.device)
        self._broker: _Embedded | None = None
        self._spool: Spool | None = None
        self._events: EventWriter | None = None
        self._home: HomeAssistant | None = None
        self._live_above = _LIVE_ABOVE
        self._publish_result: ResultPublisher | None = None
        self._losses: dict[str, int] = {}
        self._losses_due_ns = 0
        self._alarms: dict[str, str] = {}
        self._start_told = False
        self._state_seq = itertools.count()
        self.config_digest = config.digest
        """Of the configuration in force."""
        self.link: MqttLink | None = None

    # --- life

    def start(
        self,
        store: Path,
        attach: Callable[[MqttLink], None] | None = None,
        *,
        hardware: str | None = None,
        sensors: bool = False,
    ) -> None:
        """Open the spool and begin to connect. Raises MqttError where `[mqtt]` cannot be used as it is.

        `attach` subscribes whoever takes messages: before the first connect, which brings what the broker kept.
        `hardware`: the module's name, None where it is not known. `sensors`: whether watts and degrees are read.
        """
        mqtt = self._config.mqtt
        if mqtt is None:
            return
        settings = self._settings(mqtt)
        spool = self._spool = self._make_spool(store)
        # before the spool opens: what it finds wrong then is an event too
        self._events = EventWriter(self._identity, self._clock, clock_synced, spool)
        spool.start()
        self._tell_start()
        presence = Presence(
            self._topics.presence,
            online=self._presence(online=True),
            offline=self._presence(online=False, will=True),
            goodbye=lambda: self._presence(online=False),
        )
        link = self.link = MqttLink(
            settings,
            presence=presence,
            lanes=spool.lanes,
            capacity=mqtt.queue,
            backlog_rate=mqtt.backlog_rate,
            on_event=self._link_event,
        )
        self._live_above = max(_LIVE_ABOVE, int(mqtt.backlog_rate * _LIVE_S))
        # also where it is off now: what was announced before is taken back
        self._home = HomeAssistant(
            mqtt.home_assistant,
            self._identity,
            store / HOME_ASSISTANT_FILE,
            link.set_retained,
            window_s=self._config.telemetry.window_s,
            hardware=hardware,
            sensors=sensors,
        )
        if mqtt.results:
            self._publish_result = ResultPublisher(self._identity, self._clock, clock_synced, link.publish_now)
        if attach is not None:
            attach(link)
        link.start()

    def stop(self, left_s: Callable[[float], float]) -> None:
        """Send what can be sent, say goodbye, keep the rest. `left_s(most)`: how long a step may take."""
        if self._spool is not None:
            self._spool.flush(left_s(FLUSH_S))
        settled = self.link is not None and self.link.close(left_s(CLOSE_S))
        if self.link is not None and not settled:
            log.info("mqtt: not everything could be sent and acknowledged; windows and events stay in the store")
        closed = self._spool is not None and self._spool.close(left_s(SPOOL_CLOSE_S))
        if self._spool is not None and not closed:
            log.warning("spool: it could not be closed cleanly; the next start will say so")
        if settled and closed and self._home is not None:  # a disk that hangs would hold up this thread
            self._home.settled()
        if self._broker is not None:
            self._broker.stop(left_s(CLOSE_S))

    # --- out

    def window(self, report: WindowReport, numbered: Callable[[WindowReport], None]) -> None:
        """Send a window. `numbered` gets it with the number it is published under, on the thread "spool"."""

        def make(seq: int) -> bytes:
            final = report.model_copy(update={"seq": seq})
            numbered(final)
            return final.to_json()

        if self._spool is not None:
            self._spool.append(TELEMETRY, self._topics.window, make)
        self._tell_start()
        self._tell_losses()

    def result(self, result: FrameResult) -> None:
        if self._publish_result is not None:
            self._publish_result(result)

    def reported(self, models: Sequence[ReportedModel], cameras: Sequence[ReportedCamera]) -> None:
        """What runs, retained."""
        if self.link is not None:
            report = Reported(
                device=self._identity.device,
                boot=self._identity.boot,
                session=self._identity.session,
                version=self._identity.version,
                seq=next(self._state_seq),
                t_utc=utc_text(self._clock.utc()),
                clock_synced=clock_synced(),
                models=list(models),
                cameras=list(cameras),
                config_digest=self.config_digest,
            )
            self.link.set_retained(self._topics.reported, report.to_json())
        if self._home is not None:
            self._home.announce(cameras)

    @property
    def events(self) -> EventWriter | None:
        """Where events go; None without a broker."""
        return self._events

    # --- looking

    def loops(self) -> dict[str, LoopView]:
        """The loops to supervise."""
        if self.link is None:
            return {}
        limits = LOOP_SILENCE_S if self.link.status().connected else LOOP_SILENCE_S | {"mqtt-net": CONNECTING_S}
        ticks = self.link.ticks()
        return {name: LoopView(ticks[name][1], limit_s) for name, limit_s in limits.items() if name in ticks}

    def dead(self) -> list[str]:
        """Threads that ended by themselves."""
        ticks = {} if self.link is None else self.link.ticks()
        if self._spool is not None:
            ticks |= self._spool.ticks()
        return [name for name, (thread, _) in ticks.items() if not thread.is_alive()]

    def broker_view(self) -> BrokerView | None:
        if self.link is None:
            return None
        status = self.link.status()
        return BrokerView(status.connected, status.reason)

    def alarms(self) -> list[str]:
        alarms = list(self._alarms.values())
        if self._spool is not None:
            ticks = self._spool.ticks().values()
            if any(time.monotonic_ns() - tick_ns > SPOOL_SILENCE_S * 1e9 for _, tick_ns in ticks):
                alarms.append("the store's disk hangs: what waits is not written, nor what was stored sent")
        if self.link is not None:
            alarms += [f"the broker refuses what lane {lane} sends" for lane in self.link.status().held]
        return alarms

    def mqtt_now(self) -> MqttNow | None:
        """The connection, for the status report."""
        if self.link is None:
            return None
        status = self.link.status()
        return MqttNow(
            connected=status.connected,
            reason=None if status.connected else status.reason,
            since_s=round((time.monotonic_ns() - status.since_ns) / 1e9, 3),
            protocol=status.protocol,
            queued=status.queued,
            dropped=status.dropped,
            results_dropped=status.results_dropped,
            refused=status.refused,
            published=status.published,
            reconnects=status.reconnects,
            held=list(status.held),
        )

    def spool_now(self) -> SpoolNow | None:
        if self._spool is None:
            return None
        status = self._spool.status()
        lanes = [
            SpoolLane(
                name=name,
                queued=status.waiting[name],
                dropped=status.dropped[name],
                refused=status.refused[name],
            )
            for name in (EVENT, TELEMETRY)
        ]
        try:
            size_bytes = (self._config.device.store / "spool.sqlite").stat().st_size
        except OSError:
            size_bytes = None
        where: Literal["disk", "memory"] = "disk" if status.on_disk else "memory"
        return SpoolNow(
            where=where,
            reason=status.reason,
            size_bytes=size_bytes,
            lanes=lanes,
            gaps_pending=status.gaps_pending,
            reserve_touched=status.reserve_touched,
        )

    # --- parts

    def _settings(self, mqtt: MqttConfig) -> BrokerSettings:
        host, port, protocol = mqtt.host, mqtt.port, mqtt.protocol
        if mqtt.broker == "embedded":
            self._broker = _Embedded(port)
            host, port, protocol = self._broker.host, self._broker.port, self._broker.protocol
            log.info("embedded broker on %s:%d", host, port)
        settings = BrokerSettings(
            host=host,
            port=port,
            client_id=f"edge-runtime-{self._identity.device}",
            protocol=protocol,
            username=mqtt.username,
            password_file=mqtt.password_file,
            ca_file=mqtt.ca_file,
            cert_file=mqtt.cert_file,
            key_file=mqtt.key_file,
            keepalive_s=mqtt.keepalive_s,
            use_tls=mqtt.tls,
        )
        if settings.password_file is not None and not settings.tls and not is_loopback(host):
            log.warning("mqtt: the password crosses the network to %s as it is: set mqtt.tls or mqtt.ca_file", host)
        return settings

    def _presence(self, *, online: bool, will: bool = False) -> bytes:
        return messages.Presence(
            online=online,
            device=self._identity.device,
            boot=self._identity.boot,
            session=self._identity.session,
            version=self._identity.version,
            seq=next(self._state_seq),
            clock_synced=clock_synced(),
            t_utc=None if will else utc_text(self._clock.utc()),
        ).to_json()

    def _make_spool(self, store: Path) -> Spool:
        telemetry = self._config.telemetry
        return Spool(
            store,
            self._identity,
            self._clock,
            lanes=spool_lanes(telemetry.spool_mb * MIB, telemetry.spool_days * 86_400),
            options=SpoolOptions(
                max_file_bytes=telemetry.spool_mb * MIB, disk_reserve_bytes=telemetry.disk_reserve_mb * MIB
            ),
            alarm=self._spool_alarm,
            on_saved=self._saved,
            gap_message=self._gap_message,
            clock_synced=clock_synced,
        )

    def _saved(self, lane: str, row: SpoolRow) -> None:
        """On the thread "spool": a row may be sent. One that others wait before is shown at once, too (ADR 17)."""
        if lane != TELEMETRY or self.link is None or self._spool is None:
            return
        if self._spool.lane(TELEMETRY).waiting() > self._live_above and self.link.status().connected:
            self.link.publish_now(self._topics.live, row.payload)

    def _gap_message(self, gap: Gap) -> tuple[str, Make]:
        assert self._events is not None
        return self._events.gap_message(gap)

    def _spool_alarm(self, code: str, message: str) -> None:
        """On the thread "spool": the disk changed its mind."""
        over = _OVER.get(code)
        if over is not None:
            self._alarms.pop(over, None)
        elif code != "spool_corrupt":  # that is over when it is told: a fresh file is in its place
            self._alarms[code] = message
        if self._events is not None:
            severity: Severity = "error" if over is None else "info"
            self._events.emit("spool", message, severity=severity, code=code)

    def _link_event(self, event: LinkEvent) -> None:
        """On a thread of the link: something happened to the connection."""
        if self._events is not None:
            severity: Severity = "info" if event.what in ("opened", "suspended") else "warning"
            self._events.emit("broker", event.message, severity=severity, what=event.what, **event.data)

    def _tell_start(self) -> None:
        """How the session before ended, once the spool knows: a disk that is in trouble at first lets it know later."""
        if self._start_told or self._spool is None or self._events is None or self._spool.previous is None:
            return
        self._start_told = True
        if self._events.emit_start(self._spool.previous):
            log.warning("the session before this one did not end cleanly")

    def _tell_losses(self) -> None:
        """What did not reach the broker since this was told last, and why. What the spool loses it tells itself."""
        now_ns = self._clock.monotonic_ns()
        if self.link is None or self._spool is None or now_ns < self._losses_due_ns:
            return
        status, spool = self.link.status(), self._spool.status()
        losses = {
            "answers dropped from a full queue": status.dropped - sum(spool.dropped.values()),
            "messages refused by the broker": status.refused,
            "results not sent": status.results_dropped,
        }
        new = {what: count - self._losses.get(what, 0) for what, count in losses.items()}
        if any(new.values()):
            word = "connected" if status.connected else status.reason
            log.warning("mqtt (%s): %s", word, ", ".join(f"{count} {what}" for what, count in new.items() if count))
            # a broker may be away for weeks, and a line a window says no more
            self._losses_due_ns = now_ns + _LOSSES_EVERY_NS
        self._losses = losses


class _Embedded:
    """The broker of `broker = "embedded"`. Raises MqttError where it cannot listen."""

    def __init__(self, port: int) -> None:
        from edge_runtime.mqtt.embedded import EmbeddedBroker

        self._broker = EmbeddedBroker(port=port)
        self._broker.start()
        self.host, self.port, self.protocol = self._broker.host, self._broker.port, self._broker.protocol

    def stop(self, deadline_s: float) -> None:
        self._broker.stop(deadline_s)
