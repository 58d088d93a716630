"""`edge-runtime prepare import` as it is typed: on a terminal it asks, elsewhere it refuses with what to paste."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.cli.main import run
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.errors import EXIT_DONE, EXIT_REFUSED, EXIT_USAGE
from tests.engine.graphs import classifier
from tests.prepare.exports import ULTRALYTICS, YOLOV8, YOLOX, answers, pictures, tagged


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.txt"
    path.write_text("red\ngreen\nblue\n")
    return path


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pytest itself has one."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def command(tmp_path: Path, model: bytes, *more: str) -> list[str]:
    (tmp_path / "m.onnx").write_bytes(model)
    return ["prepare", "import", str(tmp_path / "m.onnx"), str(tmp_path / "out"), *more]


def terminal(arguments: list[str], typed: str) -> tuple[int, str, str]:
    """Run the program with a real terminal as input and standard error: exit code, output, what the terminal showed."""
    ours, theirs = pty.openpty()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "edge_runtime", *arguments], stdin=theirs, stderr=theirs, stdout=subprocess.PIPE
        )
        os.close(theirs)
        os.write(ours, typed.encode())
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            if not part:
                break
            shown += part
        output, _ = child.communicate(timeout=60)
    finally:
        os.close(ours)
    return child.returncode, output.decode(), shown.decode().replace("\r\n", "\n")


def test_a_terminal_is_asked(tmp_path: Path, labels: Path) -> None:
    typed = "\nblue\nBGR\n\n\n1/255\n0 0 0\n1 1 1\n\n"
    code, output, shown = terminal(
        command(tmp_path, classifier(), "--labels", str(labels), "--licence", "x", "--json"), typed
    )
    assert code == EXIT_DONE, shown
    settings = json.loads(output)["settings"]
    assert settings["layout"] == {
        "value": "classify",
        "source": "fits",
        "why": "the only known one that fits y [1, 3] with 3 labels",
    }
    assert (settings["color"]["value"], settings["color"]["source"]) == ("BGR", "given")
    assert (settings["scale"]["value"], settings["resize"]["source"]) == ("1/255", "usual")
    assert "layout (classify): the only known one that fits" in shown
    assert "'blue' is none of RGB, BGR" in shown
    assert "color [RGB]: " in shown
    assert load_bundle(tmp_path / "out").manifest.input.color == "BGR"


def test_the_end_of_the_input_is_no_answer(tmp_path: Path, labels: Path) -> None:
    code, output, shown = terminal(command(tmp_path, classifier(), "--labels", str(labels)), "classify\n\x04")
    assert (code, output) == (EXIT_USAGE, "")
    assert "the input ended before every question was answered" in shown
    assert not (tmp_path / "out").exists()


def test_without_a_terminal_the_flags_to_paste_are_printed(
    tmp_path: Path, labels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tmp_path, tagged(answers(YOLOX)), "--labels", str(labels))
    assert run(arguments) == EXIT_USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    paste = shown.err.partition("and pass ")[2].partition("; or --yes")[0]
    assert paste.startswith("--layout yolox --color BGR --resize letterbox-topleft --pad 114 --scale 1 --mean 0 0 0")
    assert not (tmp_path / "out").exists()
    assert run([*arguments, *paste.split(), "--json"]) == EXIT_DONE
    assert {one["source"] for one in json.loads(capsys.readouterr().out)["settings"].values()} == {"given", "stated"}
    assert run([*arguments, "--yes", "--overwrite", "--json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["settings"]["color"]["source"] == "usual"


def test_what_ultralytics_states_needs_no_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command(tmp_path, tagged(answers(YOLOV8), ULTRALYTICS), "--json")) == EXIT_DONE
    document = json.loads(capsys.readouterr().out)
    assert document["layout"] == "yolov8"
    assert document["sanity"] is None
    assert document["settings"]["labels"]["source"] == "stated"


def test_the_sanity_run_refuses_and_leaves_its_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures(tmp_path / "pictures", 4)
    arguments = command(
        tmp_path, tagged(answers(YOLOV8), ULTRALYTICS), "--json", "--images", str(tmp_path / "pictures")
    )
    assert run([*arguments, "--sheet", str(tmp_path / "see.png")]) == EXIT_REFUSED
    shown = capsys.readouterr()
    assert "nothing is found on any of 4 pictures" in shown.err
    assert "--force imports it as it is" in shown.err
    assert (tmp_path / "see.png").is_file()
    assert not (tmp_path / "out").exists()
    assert run([*arguments, "--force"]) == EXIT_DONE
    sanity = json.loads(capsys.readouterr().out)["sanity"]
    assert sanity["pictures"] == 4
    assert sanity["found"] == [0, 0, 0, 0]
    assert sanity["evidence"]["as chosen"] == 0
    assert sanity["sheet"] == str(tmp_path / "out.import.png")
    assert Path(sanity["sheet"]).is_file()


def test_pictures_that_cannot_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, tagged(answers(YOLOV8), ULTRALYTICS), "--images")
    (tmp_path / "empty").mkdir()
    cut = tmp_path / "cut.png"
    cut.write_bytes(pictures(tmp_path / "pictures", 1)[0].read_bytes()[:-40])
    for path, words in (
        (tmp_path / "empty", "holds no pictures"),
        (cut, "damaged picture"),
        (tmp_path / "nowhere.jpg", "cannot be read"),
    ):
        assert run([*arguments, str(path)]) == EXIT_USAGE
        shown = capsys.readouterr().err
        assert words in shown
        assert str(path) in shown
    assert run([*arguments, str(cut), "--sheet", str(tmp_path / "no" / "see.png")]) == EXIT_USAGE
    assert "there is no such folder" in capsys.readouterr().err
