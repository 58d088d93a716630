"""How a model is to be fed and read: every setting with where it comes from, and what is still open.

A setting is *given* (by flag or answer), *stated* (by the file), *usual* (the documented convention of its
layout) or *fits* (the only one that the shapes allow). Given and stated ones are taken. A usual one is taken
where the layout itself was given or stated. All others are open: they are asked, or refused with what would
be suggested, and never taken in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from edge_runtime.errors import BundleError, UsageError
from edge_runtime.prepare.answers import parse_value, told
from edge_runtime.prepare.exporters import Stated
from edge_runtime.prepare.families import CAUTIONS, FAMILIES, USUAL_NORMALISATIONS
from edge_runtime.prepare.onnx_file import OnnxFile
from edge_runtime.records.spec import Color, Layout, Resize
from edge_runtime.vision.decode import suggest_layout

__all__ = [
    "Ask",
    "Question",
    "Setting",
    "Source",
    "caution",
    "flags",
    "input_settings",
    "layout_setting",
    "reasons",
    "settle",
    "size_setting",
]

Size = tuple[int, int]
Source = Literal["given", "stated", "usual", "fits"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One decision: `key` as in bundle.toml and, with dashes, on the command line.

    `source` None: there is no suggestion, and `value` is None. `why` is the reason in words; `choices` the words
    to choose from, empty for numbers. `open`: nobody has decided it yet.
    """

    key: str
    value: Any
    source: Source | None
    why: str
    choices: tuple[str, ...] = ()
    open: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for one open setting. `problem`: what was wrong with the answer before, if one was."""

    key: str
    why: str
    default: str | None
    choices: tuple[str, ...]
    problem: str | None = None


Ask = Callable[[Question], str]
"""Puts a question and returns the answer, empty for the default. Raises UsageError at the end of the input."""


def size_setting(model: OnnxFile, stated: Stated, given: tuple[Size, ...]) -> Setting:
    """The input sizes, one per variant: given, the graph's own fixed one, or the one that the metadata says."""
    if given:
        return Setting("size", tuple(dict.fromkeys(given)), "given", "given")
    shape = model.inputs[0].shape if len(model.inputs) == 1 else ()
    if len(shape) != 4:  # not for pictures: the check with any size says what is wrong
        return Setting("size", ((416, 416),), "given", "given")
    height, width = shape[2:]
    if height and width:
        return Setting("size", ((width, height),), "stated", "the model's own")
    if stated.size is not None:
        return Setting("size", (stated.size,), "stated", f"{stated.exporter}'s metadata")
    why = "the model takes pictures of any size; larger is more accurate and slower, 416x416 is a start"
    return Setting("size", None, None, why, open=True)


def layout_setting(
    shapes: Mapping[str, tuple[int, ...]],
    size: tuple[int, int],
    classes: int,
    stated: Stated,
    given: Layout | None,
    where: str,
) -> Setting:
    """The output layout, for outputs of these shapes (for a batch of one), a `size` in px and so many labels.

    Raises BundleError (code "layout_mismatch") where nothing known fits.
    """
    if given is not None:
        return Setting("layout", given, "given", "given")  # the engine's own check judges it, with its words
    found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    fits = suggest_layout(shapes, *size)
    could = [fit.layout for fit in fits if fit.classes in (None, classes)]
    if not could:
        would = " or ".join(f"{fit.layout} with {fit.classes} labels" for fit in fits)
        raise BundleError(
            f"the outputs {found} fit no known layout with {classes} labels",
            code="layout_mismatch",
            where=where,
            remedy=f"they would fit {would}" if would else f"known layouts are {', '.join(FAMILIES)}",
        )
    choices = tuple(could)
    for layout in stated.layouts:
        if layout not in could:
            continue
        if stated.certain:
            return Setting("layout", layout, "stated", f"the metadata is {stated.exporter}'s, and {found} fits")
        why = f"the names are those of {stated.exporter}, and {found} fits"
        return Setting("layout", layout, "usual", why, choices, open=True)
    if len(could) == 1:
        why = f"the only known one that fits {found} with {classes} labels"
        return Setting("layout", could[0], "fits", why, choices, open=True)
    why = f"the outputs {found} could be of several layouts: {', '.join(could)}"
    return Setting("layout", None, None, why, choices, open=True)


def input_settings(layout: Setting, agreed: bool, stated: Stated, given: Mapping[str, Any]) -> list[Setting]:
    """The preprocessing for a layout that has a value: color, resize, pad, scale, mean, std and short_side.

    agreed: the layout was given or stated, so that its convention is taken. given: by those names, None where
    nothing was given.
    """
    family = FAMILIES[layout.value]
    own = stated.usual if layout.source == "stated" or layout.value in (*stated.layouts, "efficientnms") else {}
    if own:
        usual, documented = dict(own), f"{stated.exporter}'s own preprocessing"
    else:
        usual, documented = dict(family.usual()), family.documented
    std = given.get("std")
    if layout.value == "classify" and std is not None and max(std) < 1 and not own:
        usual["scale"] = 1 / 255  # such a deviation is of values 0-1
    settings = []
    for key in ("color", "resize", "pad", "scale", "mean", "std"):
        choices = {"color": get_args(Color), "resize": get_args(Resize)}.get(key, ())
        if given.get(key) is not None:
            settings.append(Setting(key, given[key], "given", "given"))
        elif usual[key] is not None:
            settings.append(Setting(key, usual[key], "usual", documented, choices, open=not agreed))
        else:
            settings.append(Setting(key, None, None, _differs(layout.value, key), choices, open=True))
    resize = given.get("resize") or usual["resize"]
    if given.get("short_side") is not None:
        settings.append(Setting("short_side", given["short_side"], "given", "given"))
    elif resize == "crop":
        why = "the crop as large as fits; where the model was tested on 224 of 256 px, say 256"
        settings.append(Setting("short_side", None, "usual", why, open=not agreed))
    return settings


def _differs(layout: Layout, key: str) -> str:
    why = f"{layout} models differ in their {key}, and a wrong one costs accuracy without an error"
    return f"{why}; usual are {USUAL_NORMALISATIONS}" if key in ("mean", "std") else why


def settle(settings: Iterable[Setting], ask: Ask | None, accept: bool, where: str) -> list[Setting]:
    """The settings with nothing open: answered through `ask`, or accepted as suggested.

    Raises UsageError (code "settings_open") with the flags to paste where there is nobody to ask, and where a
    setting without a suggestion was not given.
    """
    known = list(settings)
    if accept:
        known = [replace(one, open=False) if one.source is not None else one for one in known]
    if ask is not None:
        known = [_answered(one, ask) if one.open else one for one in known]
    still = [one for one in known if one.open]
    if not still:
        return known
    suggested = [one for one in still if one.source is not None]
    missing = [one for one in still if one.source is None]
    lines = [f"  {', '.join(values)}: {reason}" for reason, values in reasons(suggested).items()]
    lines += [f"  {one.key}: no suggestion: {one.why}" for one in missing]
    paste = flags(suggested)
    wanted = "".join(f" {_flag(one.key)} ..." for one in missing)
    remedy = f"check, and pass {paste}{wanted}".replace("  ", " ")
    if suggested and not missing:
        remedy += "; or --yes to take what is suggested"
    raise UsageError(
        "how pictures go in and outputs are read was not said:\n" + "\n".join(lines) + "\n",
        code="settings_open",
        where=where,
        remedy=remedy,
    )


def reasons(settings: Iterable[Setting]) -> dict[str, list[str]]:
    """The settings as `key = value`, by source and reason."""
    grouped: dict[str, list[str]] = {}
    for one in settings:
        grouped.setdefault(f"{one.source} ({one.why})", []).append(f"{one.key} = {told(one.value)}")
    return grouped


def _answered(setting: Setting, ask: Ask) -> Setting:
    default = told(setting.value) if setting.source is not None else None
    question = Question(setting.key, setting.why, default, setting.choices)
    while True:
        text = ask(question).strip()
        if not text and default is not None:
            return replace(setting, open=False)
        try:
            value = parse_value(setting.key, text, setting.choices)
        except ValueError as error:
            question = replace(question, problem=str(error))
            continue
        return replace(setting, value=value, source="given", why="answered", open=False)


def flags(settings: Iterable[Setting]) -> str:
    """The settings as flags to paste."""
    return " ".join(f"{_flag(one.key)} {told(one.value)}" for one in settings if one.value is not None)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def caution(layout: Layout, settings: Iterable[Setting]) -> str | None:
    """What users of this layout trip over, where its convention was taken."""
    if layout in CAUTIONS and any(one.key == "color" and one.source == "usual" for one in settings):
        return CAUTIONS[layout]
    return None
