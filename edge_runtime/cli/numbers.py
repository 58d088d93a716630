"""Numbers on the command line, refused in words."""

from __future__ import annotations

import argparse


def positive(text: str) -> float:
    """A number above 0 and below 1e9."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def count(text: str) -> int:
    """A whole number from 1 to 10,000."""
    if not (text.isdecimal() and 0 < int(text) <= 10_000):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 10000")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def whole(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def resamples(text: str) -> int:
    """How often a bootstrap draws: from 100 to 10,000."""
    if (value := count(text)) < 100:
        raise argparse.ArgumentTypeError(f"{text} resamples give no interval: at least 100")
    return value


def port(text: str) -> int:
    """A port, 1 to 65535."""
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 1 to 65535")
    return int(text)
