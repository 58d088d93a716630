"""What the broker refuses: held while that may be mended, given up where it is about the message itself."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

from edge_runtime.mqtt.events import LinkEvent
from edge_runtime.mqtt.holding import hold, in_words, may_be_mended, retry_s
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.outbox import MemoryLane, Message
from edge_runtime.mqtt.settings import BrokerSettings, Timing
from tests.mosquitto import Mosquitto, wait_until
from tests.mqtt.brokers import ScriptedBroker
from tests.mqtt.lanes import LongLane

FAST = Timing(retry_first_s=0.02, retry_cap_s=0.2, refused_retry_s=0.02, refused_cap_s=0.08)


class Run:
    """A link with one lane beside its memory, against a broker that answers by `codes` (by topic)."""

    def __init__(self, codes: dict[str, int], lane: LongLane | MemoryLane, timing: Timing = FAST) -> None:
        self.codes = codes
        self.events: list[LinkEvent] = []
        self.broker = ScriptedBroker(lambda topic, _: self.codes.get(topic, 0))
        settings = BrokerSettings(self.broker.host, self.broker.port, protocol="5")
        self.link = MqttLink(settings, lanes=[lane], timing=timing, on_event=self.events.append)
        self.lane = lane

    def whats(self) -> list[str]:
        return [event.what for event in self.events]

    def __enter__(self) -> Run:
        self.link.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close(0.3)
        self.broker.__exit__()


@pytest.mark.parametrize("code", [0x80, 0x83, 0x87, 0x97])
def test_what_may_be_mended_holds_the_lane_and_loses_nothing(code: int) -> None:
    lane = LongLane(200)
    with Run({"lane": code}, lane, Timing(refused_retry_s=0.01, refused_cap_s=0.01, refused_tries=10_000)) as run:
        wait_until(lambda: run.link.status().held == ("long",))
        wait_until(lambda: len(run.broker.published) > 25)
        run.link.publish("other", b"goes on")
        wait_until(lambda: run.broker.payloads("other"))
        asked = Counter(run.broker.payloads("lane"))
        assert len(asked) <= 20, "no more than the window was ever sent"
        assert [row for row, count in asked.items() if count > 1] == [b"0"], "one asks"
        run.codes.clear()
        wait_until(lambda: lane.waiting() == 0)
        status = run.link.status()
    assert (status.held, status.refused, status.published) == ((), 0, 201)
    last = {row: place for place, row in enumerate(run.broker.payloads("lane"))}
    assert sorted(last, key=last.__getitem__) == [b"%d" % number for number in range(200)], "in order"
    assert run.whats() == ["held", "opened"]
    held, opened = run.events
    assert held.data == {"lane": "long", "code": code, "reason": in_words(code)}
    assert in_words(code) in held.message
    assert opened.data["given_up"] == 0
    assert isinstance(opened.data["held_s"], float)


def test_a_row_is_given_up_after_its_tries_and_the_delay_stays() -> None:
    lane = LongLane(50)
    with Run({"lane": 0x87}, lane, Timing(refused_retry_s=0.01, refused_cap_s=0.04, refused_tries=3)) as run:
        wait_until(lambda: len(lane.refused) == 2)
        assert lane.refused[0] == "the broker refused it 3 times: not authorised (0x87)"
        assert run.link.status().held == ("long",)
        run.codes.clear()
        wait_until(lambda: lane.waiting() == 0)
        assert run.link.status().refused == len(lane.refused) <= 4
        assert run.events[-1].data["given_up"] == len(lane.refused)


def test_default_timing_loses_a_handful_in_an_hour() -> None:
    """An ACL that is wrong for an hour, by the arithmetic of the hold itself."""
    timing, now_ns, given_up, tries = Timing(), 0, 0, 1
    held = hold("telemetry", 0x87, now_ns, timing)
    while held.due_ns < 3600e9:
        tries += 1
        last = tries == timing.refused_tries
        held.refused(0x87, held.due_ns, timing, given_up=last)
        if last:
            given_up, tries = given_up + 1, 0
    assert 4 <= given_up <= 8
    assert held.delay_s == timing.refused_cap_s
    assert [retry_s(timing, refusals) for refusals in (1, 2, 7, 1000)] == [1, 2, 60, 60]


@pytest.mark.parametrize("code", [0x90, 0x99])
def test_what_is_about_the_message_is_given_up_and_the_rest_goes_on(code: int) -> None:
    lane = MemoryLane("m", 100)
    lane.put(Message("bad", b"x"))
    for number in range(30):
        lane.put(Message("good", b"%d" % number))
    with Run({"bad": code}, lane) as run:
        wait_until(lambda: run.link.status().published == 30)
        wait_until(lambda: run.link.status().refused == 1)
        assert run.broker.payloads("good") == [b"%d" % number for number in range(30)]
        assert len(run.broker.payloads("bad")) == 3
    assert not run.events
    assert not may_be_mended(code)


def test_p13_a_code_that_is_none_of_a_puback_does_not_loop() -> None:
    """0x95 says that a packet is too large, and has no place in a PUBACK: paho ends the session over it."""
    lane = MemoryLane("m", 100)
    lane.put(Message("bad", b"x"))
    lane.put(Message("good", b"y"))
    with Run({"bad": 0x95}, lane) as run:
        wait_until(lambda: run.link.status().refused == 1)
        wait_until(lambda: run.link.status().published == 1)
        assert len(run.broker.payloads("bad")) <= 4
        assert run.link.status().takeovers == 0
    assert not run.events, "nobody took our client id"


def test_no_matching_subscribers_is_success() -> None:
    lane = LongLane(30)
    with Run({"lane": 0x10}, lane) as run:
        wait_until(lambda: lane.waiting() == 0)
        status = run.link.status()
        assert (status.published, status.refused, status.held) == (30, 0, ())


def test_a_hold_of_one_refusal_is_told_to_nobody() -> None:
    """A quota that is over for a moment must not fill the lane of events."""
    lane = MemoryLane("m", 10)
    answers = iter([0x97])
    with Run({}, lane) as run:
        run.broker.code_of = lambda *_: next(answers, 0)
        lane.put(Message("lane", b"x"))
        wait_until(lambda: run.link.status().published == 1)
        assert run.link.status().held == ()
    assert not run.events


def test_only_the_row_that_asks_opens_the_lane() -> None:
    """What was under way to another topic is accepted, and must not bring the refused one its last try at once."""
    lane = MemoryLane("m", 100)
    lane.put(Message("denied", b"x"))
    for number in range(10):
        lane.put(Message("allowed", b"%d" % number))
    with Run({"denied": 0x87}, lane, Timing(refused_retry_s=0.3)) as run:
        wait_until(lambda: run.link.status().published >= 1)
        wait_until(lambda: run.link.status().held)
        assert len(run.broker.payloads("denied")) == 1
        wait_until(lambda: len(run.broker.payloads("denied")) == 2)
        assert run.link.status().refused == 0


def test_a_hold_outlives_the_session_and_asks_at_once_in_the_next() -> None:
    lane = LongLane(100)
    timing = Timing(retry_first_s=0.02, retry_cap_s=0.05, refused_retry_s=30.0, short_session_s=0.0)
    with Run({"lane": 0x87}, lane, timing) as run:
        wait_until(lambda: run.link.status().held)
        wait_until(lambda: not run.link._pump.window.flights)
        before = len(run.broker.published)
        run.broker.hang_up()
        wait_until(lambda: run.link.status().reconnects == 1)
        wait_until(lambda: len(run.broker.published) > before)
        assert run.broker.payloads("lane")[before:] == [b"0"]
        run.codes.clear()
        run.broker.hang_up()
        wait_until(lambda: lane.waiting() == 0)


def test_a_refused_state_is_tried_again_until_it_is_taken() -> None:
    lane = MemoryLane("m", 10)
    with Run({"state": 0x87}, lane) as run:
        run.link.set_retained("state", b"value")
        wait_until(lambda: len(run.broker.payloads("state")) >= 5)
        assert run.link.status().refused == 1
        run.codes.clear()
        sent = len(run.broker.payloads("state"))
        wait_until(lambda: len(run.broker.payloads("state")) > sent)


def test_callback_that_fails_stops_nothing() -> None:
    lane = LongLane(30)
    called = threading.Event()

    def fails(_: LinkEvent) -> None:
        called.set()
        raise RuntimeError("boom")

    with ScriptedBroker(lambda *_: 0x87) as broker:
        settings = BrokerSettings(broker.host, broker.port, protocol="5")
        link = MqttLink(settings, lanes=[lane], timing=FAST, on_event=fails)
        link.start()
        assert called.wait(5)
        broker.code_of = lambda *_: 0
        wait_until(lambda: lane.waiting() == 0)
        assert link.status().internal_errors == 0
        link.close(0.3)


def test_p21_acl_that_is_wrong_for_a_while_loses_nothing(tmp_path: Path) -> None:
    """A real mosquitto whose ACL denies the topic, and is then put right."""
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite other/#\n")
    lane = LongLane(100)
    events: list[LinkEvent] = []
    timing = Timing(refused_retry_s=0.05, refused_cap_s=0.1, refused_tries=10_000)
    with Mosquitto(tmp_path / "broker", [f"acl_file {acl}"]) as broker:
        settings = BrokerSettings(broker.host, broker.port, protocol="5")
        link = MqttLink(settings, lanes=[lane], timing=timing, on_event=events.append)
        link.start()
        wait_until(lambda: events)
        assert link.status().held == ("long",)
        assert link.status().connected
        acl.write_text("topic readwrite #\n")
        reload_acl(broker)
        wait_until(lambda: lane.waiting() == 0)
        assert link.close()
        assert (link.status().refused, link.status().published) == (0, 100)
    assert [event.what for event in events] == ["held", "opened"]


def reload_acl(broker: Mosquitto) -> None:
    assert broker._process is not None
    broker._process.send_signal(signal.SIGHUP)
