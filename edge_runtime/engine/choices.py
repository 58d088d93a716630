"""Which bundle a local `reload` chose for each model: a small file that outlives the daemon."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from edge_runtime.durable import REAL, Files, put_aside, sweep_aside, write_atomic
from edge_runtime.errors import EdgeError

__all__ = ["Choice", "Choices"]


@dataclass(frozen=True, slots=True)
class Choice:
    """`model` runs this variant of the bundle with this digest ("sha256:..."), since `t_utc`."""

    model: str
    bundle: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    variant: str
    t_utc: str


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal["edge.choices/1"] = Field(default="edge.choices/1", alias="schema")
    choices: tuple[Choice, ...]


class Choices:
    """The file at `path`. Any thread may call."""

    def __init__(self, path: Path, *, files: Files = REAL) -> None:
        self._path = path
        self._files = files
        self._lock = threading.Lock()
        self.trouble: str | None = None
        """What was wrong with the file when it was last read; None when nothing was."""

    def load(self) -> dict[str, Choice]:
        """The choices by model; empty where the file is missing. Also clears what a kill left beside it.

        A damaged file is put aside as `NAME.damaged`; that one, and one that cannot be read, count as empty, and
        `trouble` says so. Raises nothing.
        """
        with self._lock:
            try:
                sweep_aside(self._path, files=self._files)
            except OSError:
                pass  # a disk that takes no writes can still be read
            try:
                return self._read()
            except EdgeError:
                return {}

    def save(self, choice: Choice) -> None:
        """Put the choice in the place of the one for the same model: afterwards it is on disk.

        Raises EdgeError (code "store_write_failed", or "store_unreadable": the other choices would be lost); the old
        choice stays.
        """
        with self._lock:
            self._write(self._read() | {choice.model: choice})

    def remove(self, model: str) -> None:
        """Forget the choice for a model, if there is one; raises as `save`."""
        with self._lock:
            known = self._read()
            if known.pop(model, None) is not None:
                self._write(known)

    def _read(self) -> dict[str, Choice]:
        self.trouble = None
        try:
            found = _File.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.trouble = f"{self._path} cannot be read: {error.strerror}"
            raise EdgeError(
                f"what was chosen before cannot be read: {error.strerror}",
                code="store_unreadable",
                where=str(self._path),
                remedy="check owner and rights, and the disk (dmesg); the old choice stays",
            ) from error
        except ValidationError as error:
            self.trouble = f"{self._path} is damaged: {error.errors()[0]['msg']}"
            self.trouble += put_aside(self._path, files=self._files)
            return {}
        return {choice.model: choice for choice in found.choices}

    def _write(self, choices: dict[str, Choice]) -> None:
        kept = _File(choices=tuple(choices[model] for model in sorted(choices)))
        try:
            data = kept.model_dump_json(by_alias=True, indent=2).encode()
            write_atomic(self._path, data + b"\n", files=self._files)
        except OSError as error:
            raise EdgeError(
                f"the choice of a model cannot be saved: {error.strerror or error}",
                code="store_write_failed",
                where=str(self._path),
                remedy="look at the disk (df, dmesg); the old choice stays",
            ) from error
