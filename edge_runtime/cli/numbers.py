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


def port(text: str) -> int:
    """A port, 1 to 65535."""
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 1 to 65535")
    return int(text)
