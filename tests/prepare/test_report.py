"""The page of `prepare quantize`: whole, safe, the same for the same findings, and without the network."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.prepare.calibration_set import Difference
from edge_runtime.prepare.compare import compare
from edge_runtime.prepare.gate import judge
from edge_runtime.prepare.quantize_records import Artefact, CalibrationFacts, Searched, Tried
from edge_runtime.prepare.report import render_report
from edge_runtime.prepare.report_plots import pareto_plot, sensitivity_plot
from tests.engine.graphs import classifier, write_bundle
from tests.prepare.made_up import boxes, classification, dataset, perturbed, predictions

EVIL = "<script>alert(1)</script>"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def tried(name: str, loss: float, ms: float | None, *, front: bool = False, chosen: bool = False) -> Tried:
    speed = None if ms is None else 10 / ms
    low, high = (None, None) if speed is None else (speed * 0.9, speed * 1.1)
    return Tried(name, loss, 1 - loss, ms, speed, low, high, 0.9, 1_000_000, 25.0, 3, front, chosen)


def searched(model: bytes | None = b"x", *, timed: bool = True) -> Searched:
    points = (
        tried("everything", 0.55, 5.0 if timed else None, front=True),
        tried("all but the head", 0.008, 6.5 if timed else None, front=True, chosen=model is not None),
        tried("half", 0.02, 8.0 if timed else None),
    )
    layers = tuple((f"/head/conv{index}/$x_{index}", 0.5 / (index + 1)) for index in range(40))
    return Searched(
        model, "mse", 12, 10.0 if timed else None, 0.02, points, layers, "distance", "INT8 brings 1.5 x here"
    )


@pytest.fixture(scope="module")
def artefacts() -> tuple[Artefact, ...]:
    rng = np.random.default_rng(0)
    truths = []
    for _ in range(40):
        corner = rng.uniform(0, 300, (4, 2))
        truths.append(boxes(np.concatenate([corner, corner + rng.uniform(20, 90, (4, 2))], 1), rng.integers(0, 3, 4)))
    data = dataset(truths, ("red", EVIL, "blue"))
    before = predictions(perturbed(data, 1, jitter=0.05))
    after = predictions(perturbed(data, 2, jitter=0.2))
    gate = judge(data, before, after, max_loss=0.01, resamples=100)
    comparison = compare(data, before, after, resamples=100)
    return (
        Artefact("int8-416", "fp32-416", "onnxruntime", "refused", searched(), gate, comparison),
        Artefact("int8-trt-416", "fp32-416", "tensorrt", "nothing to gain", searched(None, timed=False), None, None),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return load_bundle(write_bundle(tmp_path_factory.mktemp("b") / "tiny", classifier()))


def page_of(source: Bundle, artefacts: tuple[Artefact, ...]) -> str:
    facts = CalibrationFacts("a" * 64, 128, (Difference("brightness", 0.7, 1e-9, 20.0, 110.0),))
    data = dataset([boxes([[0, 0, 9, 9]], [0])] * 40)
    return render_report(source, artefacts, facts, data, "a processor", (f"note {EVIL}",)).decode()


class _Strict(HTMLParser):
    """Every element closed, in order."""

    void = ("meta", "br", "hr", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "li") and self.open[-1] != tag:
            pytest.fail(f"</{tag}> closes {self.open[-1]}")
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_for_nothing(source: Bundle, artefacts: tuple[Artefact, ...]) -> None:
    page = page_of(source, artefacts)
    parser = _Strict()
    parser.feed(page)
    parser.close()
    assert not parser.open
    assert all(link.startswith("#") for link in parser.links)
    assert "<script" not in page
    assert page.count("<svg") == 4
    gate = artefacts[0].gate
    assert gate is not None
    for told in (
        f"{gate.float_value:.4f}", f"{gate.candidate:.4f}", "int8-trt-416", "all but the head", "brightness",
        "INT8 brings 1.5 x here", "a processor", "&lt;script&gt;alert(1)&lt;/script&gt;", "loses too much",
    ):  # fmt: skip
        assert told in page, told
    assert artefacts[0].comparison is not None
    assert [each.name in page for each in artefacts[0].comparison.worst] == [True] * 10


def test_the_same_findings_give_the_same_bytes(source: Bundle, artefacts: tuple[Artefact, ...]) -> None:
    assert page_of(source, artefacts[1:]) == page_of(source, artefacts[1:])


@pytest.mark.parametrize("points", [(), (tried("alone", 0.0, None, chosen=True),)])
def test_plots_are_whole_whatever_was_tried(points: tuple[Tried, ...]) -> None:
    for text in (
        pareto_plot(points, allowed=0.01, float_ms=10.0),
        sensitivity_plot([("a_{$\\frac", 0.0)], "dB & <more>"),
        sensitivity_plot([("a", float(index)) for index in range(80)], "distance"),
    ):
        drawn = ElementTree.fromstring(text)
        assert drawn.tag.endswith("svg")
        assert "date" not in text


def test_where_nothing_was_found(source: Bundle) -> None:
    empty = Searched(None, "minmax", 0, None, 0.02, (), (), "", "nothing: keep float")
    page = render_report(
        source,
        [Artefact("int8", "fp32", "onnxruntime", "nothing to gain", empty, None, None)],
        CalibrationFacts("b" * 64, 5, ()),
        dataset([boxes([], [])]),
        "cpu",
        (),
    ).decode()
    assert "Nothing came so far" in page
    assert "<svg" not in page


@pytest.mark.full
def test_a_classifier_and_no_loss(source: Bundle) -> None:
    data = dataset([detection % 3 for detection in range(40)])
    said = predictions([classification([index % 3], [0.9]) for index in range(40)])
    gate = judge(data, said, said, max_loss=0.01, resamples=100)
    artefact = Artefact(
        "int8", "fp32", "onnxruntime", "accepted", searched(), gate, compare(data, said, said, resamples=100)
    )
    page = page_of(source, (artefact,))
    assert "No class loses." in page
    assert "none loses by it" in page


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_a_browser_draws_it(source: Bundle, artefacts: tuple[Artefact, ...], tmp_path: Path) -> None:
    assert BROWSER is not None
    (tmp_path / "page.html").write_text(page_of(source, artefacts))
    picture = tmp_path / "page.png"
    command = [BROWSER, "--headless", "--no-sandbox", f"--screenshot={picture}", "--window-size=1000,3000"]
    done = subprocess.run([*command, (tmp_path / "page.html").as_uri()], capture_output=True, check=False, timeout=90)
    assert done.returncode == 0
    assert picture.stat().st_size > 20_000
