"""The demo's model bundle and clip: carried by the wheel, or found in the checkout of an editable install."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.errors import BundleError, CameraError

SCHEME = "bundled:"

_PACKAGE = Path(__file__).resolve().parent
_CARRIED = _PACKAGE / "_bundled"
_CHECKOUT = _PACKAGE.parent


def bundled_engine(name: str) -> Path:
    """The folder of the bundle `bundled:NAME`. Raises BundleError for a name that does not exist."""
    found = _find("engines", "*/bundle.toml")
    engines = {path.parent.name: path.parent for path in found}
    if name not in engines:
        raise BundleError(f"there is no bundled engine {name!r}", where=SCHEME + name, remedy=_known(sorted(engines)))
    return engines[name]


def bundled_media(name: str) -> Path:
    """The clip `bundled:NAME`. Raises CameraError for a name that does not exist."""
    clips = {path.stem: path for path in _find("media", "*.mp4")}
    if name not in clips:
        raise CameraError(f"there is no bundled clip {name!r}", where=SCHEME + name, remedy=_known(sorted(clips)))
    return clips[name]


def _find(folder: str, pattern: str) -> list[Path]:
    place = _CARRIED if _CARRIED.is_dir() else _CHECKOUT
    return sorted((place / folder).glob(pattern))


def _known(names: list[str]) -> str:
    return f"there is {', '.join(SCHEME + name for name in names)}" if names else "this installation carries none"
