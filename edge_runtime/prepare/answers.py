"""Settings as text: as they are given on the command line, answered to a question, and shown."""

from __future__ import annotations

from typing import Any

__all__ = ["parse_number", "parse_size", "parse_value", "told"]


def parse_number(text: str) -> float:
    """A number or a fraction such as 1/255. Raises ValueError with the reason in words."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below) if below else float(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is no number") from None


def parse_size(text: str) -> tuple[int, int]:
    """(width, height) in px of `416x320`, or of `416` for a square. Raises ValueError with the reason in words."""
    sides = text.lower().split("x")
    if len(sides) not in (1, 2) or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ValueError(f"{text!r} is not WIDTHxHEIGHT in px, such as 416x416")
    return int(sides[0]), int(sides[-1])


def parse_value(key: str, text: str, choices: tuple[str, ...] = ()) -> Any:
    """The value of a setting; `choices` are its words, where it has words. Raises ValueError with the reason."""
    if choices:
        if text not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")
        return text
    if key == "size":
        return (parse_size(text),)
    if key == "short_side" and text == "none":
        return None
    if key in ("pad", "short_side"):
        if not text.isdecimal():
            raise ValueError(f"{text!r} is no whole number")
        return int(text)
    if key == "scale":
        return parse_number(text)
    numbers = tuple(parse_number(word) for word in text.replace(",", " ").split())
    if len(numbers) != 3:
        raise ValueError(f"{text!r} is not three numbers")
    return numbers


def told(value: Any) -> str:
    """A value as it is written on the command line and typed as an answer."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        if value and isinstance(value[0], tuple):
            return ", ".join(f"{width}x{height}" for width, height in value)
        return " ".join(told(item) for item in value)
    if isinstance(value, float):
        return "1/255" if value == 1 / 255 else f"{value!r}".removesuffix(".0")
    return str(value)
