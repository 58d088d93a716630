"""The daemon as users run it: a process of its own, its log, its exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.awaiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
CENTERNET = ROOT / "engines" / "centernet"
VTEST = ROOT / "media" / "vtest.mp4"


class DaemonProcess:
    """`edge-runtime run -c CONFIG`. `log` is what it has written to standard error so far."""

    def __init__(self, config: Path, *arguments: str, program: Sequence[str] = ()) -> None:
        self.t_start = time.monotonic()
        self.process = subprocess.Popen(
            [*(program or (sys.executable, "-m", "edge_runtime")), "run", "-c", str(config), *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={key: value for key, value in os.environ.items() if key != "JOURNAL_STREAM"},
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="test-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._lines.extend(self.process.stderr)

    @property
    def log(self) -> str:
        return "".join(list(self._lines))

    def windows(self) -> int:
        """How many windows it has logged."""
        return len(re.findall(r"window \d+:", self.log))

    def wait_for(self, text: str, timeout_s: float = 20.0) -> None:
        """Until the log has `text`."""
        try:
            wait_until(lambda: text in self.log or self.process.poll() is not None, timeout_s, text)
        except AssertionError as error:
            raise AssertionError(f"{error}; log:\n{self.log}") from None
        assert text in self.log, f"ended with {self.process.poll()} without {text!r}; log:\n{self.log}"

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 10.0) -> tuple[int, float]:
        """Send a signal and wait: (exit code, seconds it took)."""
        start = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        took = time.monotonic() - start
        self._reader.join(5)
        return code, took

    def wait(self, timeout_s: float = 20.0) -> int:
        """The exit code, once it has ended by itself."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def peak_rss_mb(self) -> float:
        """Highest resident memory so far, MB of 2^20 bytes (VmHWM)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found.group(1)) / 1024

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


def write_config(
    folder: Path,
    *,
    camera: str = f'name = "gate"\nurl = "file:{VTEST}"',
    model: str = f'name = "detector"\nbundle = "{CENTERNET}"\nvariant = "fp32-320"',
    mqtt: str = "",
    window_s: float = 0.25,
    hardware: str = "sim:orin-nano-8gb",
    more: str = "",
) -> Path:
    """A configuration in `folder`, with its store there."""
    path = folder / "config.toml"
    path.write_text(
        f'[device]\nid = "test-device"\nhardware = "{hardware}"\nstore = "{folder / "store"}"\n'
        f"[[camera]]\n{camera}\n[[model]]\n{model}\n"
        + (f"[mqtt]\n{mqtt}\n" if mqtt else "")
        + f"[telemetry]\nwindow_s = {window_s}\n{more}",
        encoding="utf-8",
    )
    return path
