"""Calibration pictures as a set: their hash, their files, and whether they look like others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_runtime.app.evaluate import read_image
from edge_runtime.app.halving import calibration_pictures
from edge_runtime.errors import UsageError
from edge_runtime.prepare.calibration import CalibrationPicture
from edge_runtime.prepare.calibration_set import (
    FEATURES,
    _kolmogorov_smirnov,
    calibration_digest,
    differences,
    features_of,
    gather,
)
from tests.prepare.labelled import picture


@given(st.lists(st.text("0123456789abcdef", min_size=64, max_size=64), max_size=6), st.randoms())
def test_the_hash_is_that_of_the_set_not_of_its_order(digests: list[str], random: object) -> None:
    turned = list(digests)
    random.shuffle(turned)  # type: ignore[attr-defined]
    assert calibration_digest(digests) == calibration_digest(turned)
    assert calibration_digest([*digests, "0" * 64]) != calibration_digest(digests)


def test_the_test_is_kolmogorov_s() -> None:
    """D by its definition; p against the exact one of small samples, which the limit is near and not below by much:
    P(D >= 1) of 5 and 5 values is 2 / C(10, 5)."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.normal(size=int(rng.integers(1, 30))), rng.normal(0.5, 2, size=int(rng.integers(1, 30)))
        distance, probability = _kolmogorov_smirnov(a, b)
        points = np.concatenate([a, b])
        assert distance == pytest.approx(max(abs((a <= x).mean() - (b <= x).mean()) for x in points))
        assert 0 <= probability <= 1
    assert _kolmogorov_smirnov(np.arange(5.0), np.arange(5.0)) == (0.0, 1.0)
    distance, probability = _kolmogorov_smirnov(np.arange(5.0), 10 + np.arange(5.0))
    assert distance == 1.0
    assert probability == pytest.approx(2 / 252, rel=0.6)


@pytest.mark.full
def test_sets_drawn_from_the_same_are_alike() -> None:
    """Of 900 pairs, whatever they are drawn from, two at most by the bound; and what is moved by a spread is seen."""
    rng = np.random.default_rng(1)
    wrong = 0
    for trial in range(900):
        shape = (int(rng.integers(32, 400)), len(FEATURES))
        other = (int(rng.integers(32, 400)), len(FEATURES))
        draw = (rng.standard_normal, rng.standard_exponential, rng.random)[trial % 3]
        wrong += bool(differences(draw(shape), draw(other)))
    assert wrong <= 2
    one = rng.normal(size=(120, len(FEATURES)))
    moved = one.copy()
    moved[:, 1] = rng.normal(1.5, 1.0, 120)
    moved[:, 2] = rng.normal(0.0, 0.1, 120)
    assert {each.feature for each in differences(one, moved)} == set(FEATURES[1:3])
    assert not differences(one, np.zeros((0, len(FEATURES))))


def test_a_trifle_does_not_matter_however_sure() -> None:
    rng = np.random.default_rng(2)
    one, other = (rng.normal(shift, 1, (20_000, len(FEATURES))) for shift in (0.0, 0.2))
    assert _kolmogorov_smirnov(one[:, 0], other[:, 0])[1] < 1e-9
    assert not differences(one, other)


def test_what_a_picture_looks_like(tmp_path: Path) -> None:
    flat = features_of(read_image(picture(tmp_path / "red.png", (200, 0, 0))))
    named = dict(zip(FEATURES, flat.tolist(), strict=True))
    assert named["brightness"] == pytest.approx(0.299 * 200, abs=4)
    assert named["warmth"] == pytest.approx(200, abs=6)
    assert named["saturation"] == pytest.approx(200, abs=6)
    assert named["contrast"] < 1
    assert named["detail"] < 1
    grey = dict(zip(FEATURES, features_of(read_image(picture(tmp_path / "grey.png"))).tolist(), strict=True))
    assert grey["saturation"] < 2


class _Clip:
    """A frame without a file, as a clip gives it."""

    def __init__(self, path: Path) -> None:
        self.asked = 0
        self._path = path

    def pictures(self) -> Iterator[CalibrationPicture]:
        for index in range(3):
            self.asked += 1
            yield CalibrationPicture(f"clip#{index}", lambda: read_image(self._path))


def test_frames_become_files_and_come_again(tmp_path: Path) -> None:
    clip = _Clip(picture(tmp_path / "p.png", (10, 200, 30)))
    folder = tmp_path / "work"
    first = list(gather(clip.pictures(), folder, key="k", read_image=read_image))
    assert [each.name for each in first] == ["clip#0", "clip#1", "clip#2"]
    assert all(each.sha256 for each in first)
    again = list(gather(clip.pictures(), folder, key="k", read_image=read_image))
    assert clip.asked == 3
    assert [(each.name, each.sha256) for each in again] == [(each.name, each.sha256) for each in first]
    assert np.array_equal(again[1].read().to_rgb(), first[1].read().to_rgb())
    list(gather(clip.pictures(), folder, key="other", read_image=read_image))
    assert clip.asked == 6
    (folder / "000001.png").write_bytes(b"changed")
    with pytest.raises(UsageError, match="has changed since"):
        list(gather(clip.pictures(), folder, key="other", read_image=read_image))


def test_half_gathered_is_gathered_anew(tmp_path: Path) -> None:
    clip = _Clip(picture(tmp_path / "p.png"))
    pictures = gather(clip.pictures(), tmp_path / "work", key="k", read_image=read_image)
    next(pictures)
    del pictures
    assert len(list(gather(clip.pictures(), tmp_path / "work", key="k", read_image=read_image))) == 3
    assert clip.asked == 4


@pytest.mark.full
@pytest.mark.assets
def test_coco_looks_like_coco_and_a_clip_does_not(assets: Path) -> None:
    train = _features([str(assets / "calib/coco_train128")], 1)
    val = _features([str(assets / "eval/coco_val128/images")], 1)
    assert not differences(train, val)
    every = np.concatenate([train, val])
    rng = np.random.default_rng(0)
    drawn = [rng.permutation(len(every)) for _ in range(500)]
    assert sum(bool(differences(every[order[:128]], every[order[128:]])) for order in drawn) <= 1
    assert {each.feature for each in differences(_features(["bundled:vtest"], 10), val)} == set(FEATURES)
    grey = val.copy()
    grey[:, 2:4] = 0.0
    assert {each.feature for each in differences(grey, val)} >= {"saturation"}
    assert {each.feature for each in differences(train * 0.3, val)} >= {"brightness", "contrast"}


def _features(sources: list[str], every: int) -> NDArray[np.float64]:
    return np.stack([features_of(each.read()) for each in calibration_pictures(sources, every)])
