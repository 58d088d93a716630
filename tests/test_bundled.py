from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime import bundled
from edge_runtime.errors import BundleError, CameraError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "engines" / "tiny").mkdir(parents=True)
    (tmp_path / "engines" / "tiny" / "bundle.toml").touch()
    (tmp_path / "engines" / "no-bundle").mkdir()
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "walk.mp4").touch()
    monkeypatch.setattr(bundled, "_CARRIED", tmp_path)
    return tmp_path


def test_wheel_s_own_files_come_first(place: Path) -> None:
    assert bundled.bundled_engine("tiny") == place / "engines" / "tiny"
    assert bundled.bundled_media("walk") == place / "media" / "walk.mp4"


def test_editable_install_falls_back_to_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundled, "_CARRIED", tmp_path / "absent")
    checkout = Path(__file__).resolve().parents[1]
    assert bundled.bundled_engine("centernet") == checkout / "engines" / "centernet"
    assert bundled.bundled_media("vtest") == checkout / "media" / "vtest.mp4"


@pytest.mark.parametrize("name", ["no-bundle", "absent", "", "../engines/tiny"])
def test_unknown_engine_names_those_that_exist(place: Path, name: str) -> None:
    with pytest.raises(BundleError, match="there is bundled:tiny"):
        bundled.bundled_engine(name)


@pytest.mark.parametrize("name", ["walk.mp4", "absent", "", "../media/walk"])
def test_unknown_clip_names_those_that_exist(place: Path, name: str) -> None:
    with pytest.raises(CameraError, match="there is bundled:walk"):
        bundled.bundled_media(name)


def test_installation_without_any_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundled, "_CARRIED", tmp_path)
    with pytest.raises(BundleError, match="carries none"):
        bundled.bundled_engine("centernet")
