"""The pump's lanes: who is next, what a refusal means, how fast a backlog goes. All on the pump's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_runtime.mqtt.events import LinkEvent, OnEvent
from edge_runtime.mqtt.holding import accepted, hold, in_words, may_be_mended
from edge_runtime.mqtt.outbox import Feed, Flight, Lane, Row
from edge_runtime.mqtt.rate import TokenBucket
from edge_runtime.mqtt.settings import Timing
from edge_runtime.mqtt.window import WINDOW, Window

log = logging.getLogger(__name__)

_TRIES = 3


@dataclass(slots=True)
class LaneCounters:
    """Rows since the start. `refused` are those given up, too large ones included."""

    published: int = 0
    refused: int = 0
    oversize: int = 0
    expired: int = 0


class Lanes:
    """Sends rows in order, lane by lane in turn, and settles them.

    `memory` is the lane of the callers; of `lanes` together, `backlog_rate` rows a second are sent at most (None:
    no cap). `before_rows` is called between a read and the sending of what was read.
    """

    def __init__(
        self,
        window: Window,
        memory: Lane,
        lanes: Sequence[Lane],
        *,
        timing: Timing,
        backlog_rate: float | None,
        before_rows: Callable[[], None],
        on_event: OnEvent,
    ) -> None:
        self._window = window
        self._timing = timing
        self._before_rows = before_rows
        self._on_event = on_event
        self._bucket = None if backlog_rate is None else TokenBucket(backlog_rate, window.now_ns)
        self._feeds = [Feed(memory), *(Feed(lane, capped=backlog_rate is not None) for lane in lanes)]
        self._turn_of = 0
        self.counters = LaneCounters()
        self.held: tuple[str, ...] = ()

    def waiting(self) -> int:
        return sum(feed.lane.waiting() for feed in self._feeds)

    def tell_done(self) -> None:
        """Lets every lane forget what the broker has."""
        for feed in self._feeds:
            if feed.acked:
                tokens, feed.acked = feed.acked, []
                feed.lane.done(tokens)

    def reset(self) -> None:
        """The session is over: everything that is not settled is read, and sent, again."""
        for feed in self._feeds:
            feed.cursor = -1
            feed.again.clear()
            if feed.hold is not None:
                feed.hold.probe = None
                feed.hold.due_ns = self._window.now_ns  # who restarted the broker may have mended it

    # ---- what the broker says

    def acknowledged(self, feed: Feed, row: Row, code: int) -> None:
        if accepted(code):
            self._accepted(feed, row)
        elif may_be_mended(code):
            self._refused(feed, row, code)
        else:
            self._refused_for_good(feed, row, code)

    def _accepted(self, feed: Feed, row: Row) -> None:
        self.counters.published += 1
        feed.breaks.pop(row.token, None)
        feed.refusals.pop(row.token, None)
        feed.acked.append(row.token)
        # What was under way when the lane was held may have another topic: only the row that asked opens it.
        if feed.hold is not None and feed.hold.probe == row.token:
            event = feed.hold.opened(self._window.now_ns)
            feed.hold = None
            feed.refusals.clear()
            feed.again = [(self._window.now_ns, one) for _, one in feed.again]
            self._tell(event)

    def _refused(self, feed: Feed, row: Row, code: int) -> None:
        """Held until the broker takes a row again, one asks at a time: a mistake at the broker loses a handful."""
        now_ns = self._window.now_ns
        refusals = feed.refusals[row.token] = feed.refusals.get(row.token, 0) + 1
        given_up = refusals >= self._timing.refused_tries
        if given_up:
            self._set_aside(feed, row, f"the broker refused it {refusals} times: {in_words(code)}")
        else:
            feed.send_again(row, now_ns)
        if feed.hold is None:
            feed.hold = hold(feed.lane.name, code, now_ns, self._timing)
            self._tell(None)
        elif feed.hold.probe == row.token:
            self._tell(feed.hold.refused(code, now_ns, self._timing, given_up=given_up))

    def _refused_for_good(self, feed: Feed, row: Row, code: int) -> None:
        retry_ns = self._window.now_ns + int(self._timing.refused_retry_s * 1e9)
        if not self.broke(feed, row, f"the broker refused it: {in_words(code)}"):
            feed.send_again(row, retry_ns)
        if feed.hold is not None and feed.hold.probe == row.token:
            feed.hold.probe = None  # it says nothing about the others
            feed.hold.due_ns = retry_ns

    def broke(self, feed: Feed, row: Row, reason: str) -> bool:
        """Counts an answer that is about this row; true if it was the last one it gets."""
        breaks = feed.breaks[row.token] = feed.breaks.get(row.token, 0) + 1
        if breaks < _TRIES:
            return False
        self._set_aside(feed, row, reason)
        return True

    def _tell(self, event: LinkEvent | None) -> None:
        self.held = tuple(feed.lane.name for feed in self._feeds if feed.hold is not None)
        if event is not None:
            log.warning("mqtt: %s", event.message)
            self._on_event(event)

    def _set_aside(self, feed: Feed, row: Row, reason: str) -> None:
        feed.breaks.pop(row.token, None)
        feed.refusals.pop(row.token, None)
        self.counters.refused += 1
        log.warning("mqtt: %s: a message to %s is given up: %s", feed.lane.name, row.message.topic, reason)
        feed.lane.refuse(row.token, reason)

    # ---- sending

    def send(self) -> None:
        """As much as window and cap allow: first what was refused and is due, then the lanes in turn."""
        for feed in self._feeds:
            if feed.hold is None:
                self._send_again(feed)
            else:
                self._ask(feed)
        idle = 0
        while idle < len(self._feeds) and (room := self._window.room()) > 0:
            feed = self._feeds[self._turn_of]
            self._turn_of = (self._turn_of + 1) % len(self._feeds)
            # a fair share of the room, so that a long backlog of one lane does not hold up the others
            limit = min(max(1, room // len(self._feeds)), self._allowed(feed))
            if limit < 1 or feed.hold is not None or self._is_due(feed):
                idle += 1
                continue
            rows = feed.lane.read(feed.cursor, limit)
            idle = idle + 1 if not rows else 0
            self._before_rows()
            for row in rows:
                if not self._send_row(feed, row):
                    return
                feed.cursor = row.token

    def _allowed(self, feed: Feed) -> int:
        """How many rows of this lane the cap leaves now."""
        if not feed.capped or self._bucket is None:
            return WINDOW
        tokens = self._bucket.tokens(self._window.now_ns)
        if tokens < 1:
            self._window.wake_at(self._bucket.ready_ns())
        return tokens

    def _is_due(self, feed: Feed) -> bool:
        """Whether a refused row still has to go before newer ones."""
        return any(due_ns <= self._window.now_ns for due_ns, _ in feed.again)

    def _send_again(self, feed: Feed) -> None:
        late: list[tuple[int, Row]] = []
        while feed.again and self._window.room() > 0 and self._allowed(feed) > 0:
            due_ns, row = feed.again.pop(0)
            if due_ns > self._window.now_ns:
                late.append((due_ns, row))
                self._window.wake_at(due_ns)
            elif not self._send_row(feed, row):
                late.append((due_ns, row))
                break
        feed.again = late + feed.again

    def _ask(self, feed: Feed) -> None:
        """Sends a held lane's oldest row, by which it learns whether the broker takes its rows again."""
        held = feed.hold
        if held is None or held.probe is not None:
            return
        if held.due_ns > self._window.now_ns:
            self._window.wake_at(held.due_ns)
            return
        while held.probe is None and self._window.room() > 0 and self._allowed(feed) > 0:
            row = self._oldest(feed)
            if row is None:
                return
            sent_before = len(self._window.flights)
            if not self._send_row(feed, row):
                return
            if feed.again:
                feed.again.pop(0)
            else:
                feed.cursor = row.token
            if len(self._window.flights) > sent_before:  # and not expired or too large
                held.probe = row.token

    def _oldest(self, feed: Feed) -> Row | None:
        if feed.again:
            return feed.again[0][1]
        rows = feed.lane.read(feed.cursor, 1)
        if rows and feed.cursor < 0:
            feed.forget_before(rows[0].token)
        return rows[0] if rows else None

    def _send_row(self, feed: Feed, row: Row) -> bool:
        """False if the session did not take it; true also for a row that was disposed of."""
        message = row.message
        expiry_s = None
        if message.t_expires_ns is not None:
            left_ns = message.t_expires_ns - self._window.now_ns
            if left_ns <= 0:
                self.counters.expired += 1
                feed.lane.done((row.token,))
                return True
            expiry_s = max(1, left_ns // 1_000_000_000)
        if not self._window.fits(message.topic, message.payload):
            self.counters.oversize += 1
            self._set_aside(feed, row, "it is larger than the broker takes")
            return True
        flight = Flight(self._window.now_ns, feed=feed, row=row)
        try:
            if not self._window.send(flight, message.topic, message.payload, retain=message.retain, expiry_s=expiry_s):
                return False
        except ValueError as error:
            self._set_aside(feed, row, str(error))
            return True
        if feed.capped and self._bucket is not None:
            self._bucket.take()
        return True
