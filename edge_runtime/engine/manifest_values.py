"""What a value in a bundle.toml may be, and the base of its tables."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

__all__ = ["FileTable", "Finite", "Name", "Positive", "Sha256", "Side", "Table", "Text", "Unit"]

_SHA256 = r"^[0-9a-f]{64}$"
Sha256 = Annotated[str, StringConstraints(pattern=_SHA256)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Unit = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Side = Annotated[int, Field(ge=1, le=16384)]


class Table(BaseModel):
    """A table whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileTable(Table):
    """A file of the bundle (path relative to bundle.toml) and the sha256 of its content, 64 hex digits."""

    path: Text
    sha256: Sha256
