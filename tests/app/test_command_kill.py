"""Commands over a real broker while the process that obeys them is killed again and again."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.conftest import ROOT as PROJECT
from tests.mosquitto import Mosquitto, Seen, Subscriber, wait_until

ROOT = "edge/v1/gate-07"
OUTSTANDING = 40


class Client:
    """Sends commands of QoS 1 on a thread of its own, as long as not too many are without an outcome."""

    def __init__(self, broker: Mosquitto, marks: Path) -> None:
        self._subscriber = Subscriber(broker, f"{ROOT}/reply/+", client_id="client")
        self._marks = marks
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-client", daemon=True)
        self.sent: list[str] = []

    def start(self) -> None:
        """Before a device has subscribed once, a broker keeps nothing for it."""
        self.sent.append("c0")

        def answered() -> bool:
            self.send("c0")
            return "c0" in self.outcomes()

        wait_until(answered, what="the first reply")
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self._subscriber.close()

    def finish(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(20)

    def _run(self) -> None:
        for number in itertools.count(1):
            while len(self.open()) >= OUTSTANDING:
                if self._stopping.wait(0.02):
                    return
            if self._stopping.is_set():
                return
            self.sent.append(f"c{number}")
            self.send(f"c{number}")

    def send(self, command_id: str) -> None:
        name = "slow-mark" if int(command_id[1:]) % 3 == 0 else "mark"
        # the same text whenever it is sent
        wish = {"id": command_id, "expires_utc": EXPIRES, "args": {"mark": command_id}}
        self._subscriber.publish(f"{ROOT}/cmd/{name}", json.dumps(wish).encode())

    def marked(self) -> Counter[str]:
        """How often each was obeyed."""
        return Counter(self._marks.read_text(encoding="ascii").split() if self._marks.exists() else ())

    def outcomes(self) -> dict[str, set[str]]:
        """By id `ok` or the code of the error, in every final reply."""
        return final(self._subscriber.seen())

    def open(self) -> set[str]:
        """Those that were neither obeyed nor answered, so far as one can see from here."""
        return set(self.sent) - self.marked().keys() - self.outcomes().keys()


def final(seen: Sequence[Seen]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in seen:
        reply = json.loads(one.payload)
        word = "ok" if reply["ok"] else reply["error"]["code"]
        if word != "in_progress":
            found.setdefault(reply["id"], set()).add(word)
    return found


EXPIRES = (datetime.now(timezone.utc) + timedelta(hours=2)).isoformat()


def child(store: Path, broker: Mosquitto) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.app.command_child", str(store), str(broker.port)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
    )


def ready(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == "ready\n"


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_each_is_obeyed_at_most_once_and_answered_and_none_is_lost(tmp_path: Path, kills: int) -> None:
    store = tmp_path / "store"
    store.mkdir()
    chance, pause = random.Random(kills), threading.Event()
    with Mosquitto(tmp_path / "broker") as broker, Client(broker, store / "marks") as client:
        process = child(store, broker)
        try:
            assert ready(process)
            client.start()
        finally:
            end(process)
        for _ in range(kills - 1):
            process = child(store, broker)
            try:
                assert ready(process)
                pause.wait(chance.uniform(0, 0.25))
            finally:
                end(process)
        client.finish()
        process = child(store, broker)
        try:
            assert ready(process)
            wait_until(lambda: not client.open(), 30, "an outcome of every command")
            # obeyed, and killed before the reply was out: whoever misses one asks again
            silent = set(client.sent) - client.outcomes().keys()
            for command_id in silent:
                client.send(command_id)
            wait_until(lambda: set(client.sent) == client.outcomes().keys(), 30, "a reply to every command")
        finally:
            end(process)
        marked, outcomes = client.marked(), client.outcomes()
    counts = Counter(next(iter(words)) for words in outcomes.values())
    print(f"{len(outcomes)} commands, {dict(counts)}, {len(silent)} asked again")
    assert len(outcomes) > 5 * kills
    assert set(counts) <= {"ok", "interrupted"}
    assert [each for each, words in outcomes.items() if len(words) != 1] == []
    assert [each for each, count in marked.items() if count != 1] == []
    assert [each for each, words in outcomes.items() if words == {"ok"} and each not in marked] == []
