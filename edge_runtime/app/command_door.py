"""Commands from the broker: accepted before they are acknowledged, obeyed in order, answered; and what a start finds
of them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from edge_runtime.control.dispatcher import Dispatcher, Task
from edge_runtime.errors import RefusedError
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.session import Incoming
from edge_runtime.records.commands import Reply
from edge_runtime.telemetry.topics import Topics
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

SLOW_AT_A_TIME = 4
"""Commands that take their time, at a time; more wait in line with each other."""
MOST_WAITING = 64
"""Accepted commands that wait to be obeyed, fast and slow ones each; further ones are refused."""
RETRY_S = 5.0
MALFORMED = "malformed"
"""In the place of an id, the last level of the topic of replies to commands without a readable one."""


class CommandDoor:
    """The thread "commands" obeys fast commands in order, up to four threads "command-slow" the slow ones. Commands
    that change nothing are answered at once, on "mqtt-handler".

    `attach` and `start` once, `halt` and `stop` at the end. `retry_s`: after how long a disk that took no writes, or a
    clock that was not synchronised, is looked at again. `on_death`: see ThreadGroup.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        device: str,
        on_death: Callable[[str, BaseException], None] | None = None,
        *,
        retry_s: float = RETRY_S,
    ) -> None:
        self._dispatcher = dispatcher
        self._topics = Topics(device)
        self._retry_s = retry_s
        self._link: MqttLink | None = None
        self._threads = ThreadGroup(on_death)
        self._changed = threading.Condition()
        self._fast: deque[Task] = deque()
        self._slow: deque[Task] = deque()
        self._slow_running = 0
        self._held = False
        """Whether the first of the fast ones is to be tried again later."""
        self._started = False
        self._halted = False

    # --- life

    def attach(self, link: MqttLink) -> None:
        """Take commands from the broker, once this is started.

        Before the link is: what the broker kept meanwhile comes with the first connect, and what nobody takes is gone.
        """
        self._link = link
        link.subscribe(self._topics.command("+"), self._take)

    def start(self) -> None:
        """Answer and obey what an earlier start left; from now on everything is there that commands need."""
        self._recover()
        with self._changed:
            self._started = True
            self._changed.notify_all()
        self._threads.spawn("commands", self._run)

    def halt(self) -> None:
        """Begin no further command: what is accepted by now is left to the next start. Never waits."""
        with self._changed:
            self._halted = True
            self._changed.notify_all()

    def stop(self, deadline_s: float) -> list[str]:
        """`halt`, and wait for the commands that are being obeyed. The names of threads that did not end in time: what
        they do is answered as `interrupted` by the next start."""
        self.halt()
        return self._threads.join(deadline_s)

    # --- in, on "mqtt-handler"

    def _take(self, incoming: Incoming) -> None:
        """Returning acknowledges the message: by then it is answered, or on disk. Raises RefusedError for one that the
        broker should keep for the next start."""
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._halted)
            if not self._started:
                raise self._stopping()
        if incoming.retained and not incoming.payload:
            return  # somebody clears the topic, as the answer to a retained command tells them to
        name = incoming.topic.removeprefix(self._topics.command(""))
        queue = self._slow if self._dispatcher.slow(name) else self._fast
        # between this and `_put` nobody adds to the queue, but for what a disk that came back may have to tell
        taken = self._dispatcher.accept(
            name, incoming.payload, retained=incoming.retained, door="mqtt", refusal=self._refusal(queue)
        )
        if isinstance(taken, Reply):
            self._answer(taken)
        elif not taken.spec.changes:
            self._obey(taken)
        else:
            self._put(taken)

    def _refusal(self, queue: deque[Task]) -> RefusedError | None:
        if self._halted:
            return self._stopping()
        if len(queue) >= MOST_WAITING:
            text = f"{len(queue)} commands wait to be obeyed"
            return RefusedError(text, code="busy", remedy="wait for their replies", retryable=True)
        return None

    @staticmethod
    def _stopping() -> RefusedError:
        return RefusedError("the daemon is about to end", code="stopping", remedy="send it again", retryable=True)

    def _put(self, task: Task) -> None:
        with self._changed:
            (self._slow if task.spec.slow else self._fast).append(task)
            self._changed.notify_all()
        self._start_slow()

    # --- obeying

    def _run(self) -> None:
        """Fast commands, one after the other: one that cannot be obeyed now holds up those behind it."""
        while True:
            with self._changed:
                due = self._changed.wait_for(lambda: self._halted or (self._fast and not self._held), self._retry_s)
                if self._halted:
                    return
            if due:
                self._held = not self._obey(self._fast[0])
                if not self._held:
                    with self._changed:
                        self._fast.popleft()
            else:
                self._held = False
                self._recover()
                self._start_slow()

    def _start_slow(self) -> None:
        with self._changed:
            new = min(len(self._slow), SLOW_AT_A_TIME - self._slow_running)
            if self._halted or new <= 0:
                return
            self._slow_running += new
        for _ in range(new):
            self._threads.spawn("command-slow", self._run_slow)

    def _run_slow(self) -> None:
        while True:
            with self._changed:
                if self._halted or not self._slow:
                    self._slow_running -= 1
                    return
                task = self._slow.popleft()
            if not self._obey(task):
                with self._changed:
                    self._slow.appendleft(task)
                    self._slow_running -= 1
                return

    def _recover(self) -> None:
        replies, tasks = self._dispatcher.recover()
        for reply in replies:
            self._answer(reply)
        for task in tasks:
            log.info("command %s was accepted by an earlier start, and is obeyed now", task.name)
            self._put(task)

    def _obey(self, task: Task) -> bool:
        """False: not now."""
        reply = self._dispatcher.obey(task)
        if reply is not None and task.door == "mqtt":
            self._answer(reply)
        return reply is not None

    # --- out

    def _answer(self, reply: Reply) -> None:
        if self._link is not None:
            self._link.publish(self._topics.reply(reply.id or MALFORMED), reply.to_json())
