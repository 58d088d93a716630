"""TOML with places: parse a document and know on which line every key stands.

`tomllib` gives no positions and `tomlkit` does not publish its own, so a small scanner walks the text a second
time. It runs on text that `tomllib` has accepted and only has to find keys, never to judge them; on refused text
it is asked for hints, and whatever it says is allowed to be nothing.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConfigError, ConfigProblem

# By name, so that type checking for 3.10 does not need tomli installed. Both have the same interface.
_toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

MAX_FILE_BYTES = 1024 * 1024

KeyPath = tuple[str | int, ...]
"""Keys from the root; an array's element (also the n-th `[[table]]`) is its index from 0."""


@dataclass(frozen=True, slots=True)
class TomlSource:
    """A parsed document and the place of each of its keys. `lines` count from 1."""

    file: str
    text: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(repr=False)

    def line_of(self, path: KeyPath) -> int | None:
        """The line of this key, or of the closest thing around it that exists; None for the document."""
        for end in range(len(path), 0, -1):
            line = self.lines.get(path[:end])
            if line is not None:
                return line
        return None

    def problem(self, path: KeyPath, message: str, remedy: str | None = None) -> ConfigProblem:
        """A problem with the key at `path`, with its place filled in."""
        return ConfigProblem(self.file, self.line_of(path), key_text(path) or None, message, remedy)


def key_text(path: KeyPath) -> str:
    """A key as the operator says it, array elements counted from 1: `camera[3].fps`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part + 1}]"
        else:
            bare = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _quote(part)
            text += f".{bare}" if text else bare
    return text


def _quote(key: str) -> str:
    shown = key if len(key) <= 40 else f"{key[:37]}..."
    return '"' + shown.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def read_toml(path: Path) -> TomlSource:
    """Read and parse a file.

    Raises ConfigError for a file that cannot be read, is no UTF-8 text or is not TOML.
    """
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a configuration file of at most 1 MiB, without a byte order mark, line ends untouched.

    Raises ConfigError if it cannot be read or is no UTF-8 text.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _whole(
            path,
            "the file does not exist",
            "check the path; a file to start from: edge-runtime check-config --print-default",
        ) from None
    except IsADirectoryError:
        raise _whole(path, "is a directory, not a file", "name the TOML file in it") from None
    except PermissionError:
        raise _whole(path, "may not be read by this user", "give the user of the service the right to read") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) else None
        raise _whole(path, f"cannot be read: {reason or error}", None) from None
    if len(raw) > MAX_FILE_BYTES:
        raise _whole(path, "is larger than 1 MiB: this is no configuration file", "check the path")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _whole(path, "is UTF-16 text", "save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # With a byte order mark the codec counts from behind it; lines are not affected.
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{error.object[error.start]:02x} is not UTF-8 text"
        raise ConfigError([ConfigProblem(str(path), line, None, message, "save the file as UTF-8")]) from None


def _whole(path: Path, message: str, remedy: str | None) -> ConfigError:
    return ConfigError([ConfigProblem(str(path), None, None, message, remedy)])


def parse_toml(text: str, file: str) -> TomlSource:
    """Parse a document; `file` is only its name in messages.

    Raises ConfigError with the line if the text is not TOML.
    """
    try:
        data: dict[str, Any] = _toml.loads(text)
    except RecursionError:
        problem = _syntax_problem(text, file, "values are nested too deeply (at end of document)")
    except ValueError as error:  # TOMLDecodeError is one; an integer of 5000 digits is a plain one
        problem = _syntax_problem(text, file, str(error))
    else:
        return TomlSource(file, text, data, _scanned(text).lines)
    raise ConfigError([problem]) from None


def _scanned(text: str) -> _Scanner:
    scanner = _Scanner(text)
    try:
        scanner.scan()
    except (ValueError, RecursionError):
        pass  # text that is not TOML; and a good file is never refused because its lines could not be found
    return scanner


def _syntax_problem(text: str, file: str, reason: str) -> ConfigProblem:
    scanner = _scanned(text)
    place = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", reason)
    what = reason[: place.start()] if place else reason
    what = what[:1].lower() + what[1:]
    endless = re.search(r"[0-9][0-9_]{4000,}", text)
    if place and place[1]:
        line, column = int(place[1]), int(place[2])
    elif place is None and endless:  # Python's own limit, and its own words
        what, line, column = "a number has thousands of digits", text.count("\n", 0, endless.start()) + 1, 0
    else:  # at the end of the document: what was never closed is where to look, not the last line
        line, column = scanner.statement_line, 0
    if what.startswith(("cannot overwrite", "cannot declare", "cannot mutate")) and scanner.twice is not None:
        path, first, line = scanner.twice
        again = f"is given twice, first on line {first}"
        as_header = _text_of(text, line).lstrip().startswith("[")
        remedy = f"for several, write [[{key_text(path)}]] with two brackets each time" if as_header else None
        remedy = remedy or "keep one of the two"
        return ConfigProblem(file, line, key_text(path), again, remedy)
    at = f", at column {column}" if column else ""
    return ConfigProblem(file, line, None, f"not TOML: {what}{at}", _syntax_remedy(_text_of(text, line), column))


def _text_of(text: str, line: int) -> str:
    lines = text.split("\n")
    return lines[line - 1] if 0 < line <= len(lines) else ""


_HINTS: tuple[tuple[str, str], ...] = (
    ("[\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb]", "use the straight quotes \" or ' in place of typographic ones"),
    ("[\u00a0\u2007\u202f\u200b\ufeff]", "there is an invisible space character on this line: type the line anew"),
    (r"\r(?!$)", "end lines with a line feed"),
    (r"^\s*[\w.-]+\s*:", "write key = value, with = in place of :"),
    (r"=\s*(True|False|TRUE|FALSE|yes|no|on|off)\b", "write true or false, in lower case, without quotes"),
    (r"=\s*(None|null|nil)\b", "leave the key out"),
    (r'=\s*"[^"\']*\\', "write \\\\ for one \\ or put the text in single quotes"),
    (r'=\s*"[^"]*$', 'close the text with a second "'),
    (r"=\s*'[^']*$", "close the text with a second '"),
    (r"^\s*\[\[[^\]]*\]?\s*(#.*)?$", "close the header with ]]"),
    (r"^\s*\[[^\]]*(#.*)?$", "close the header with ]"),
    (r"^[^=\"'#]*\t[^=\"'#]*\S[^=\"'#]*=", "there is a tab inside the key: remove it"),
    (r"^\s*[\w.-]+\s+[\w.-]+\s*=", "a key has no spaces: join its words with _"),
    (r"=\s*(#.*)?$", "give the key a value, or leave it out"),
    (r"=\s*\.\d|=\s*[+-]?\d+\.(\D|$)", "write numbers with digits on both sides of the point, as 0.5"),
    (r"=\s*\d+,\d", "write a decimal point, not a comma"),
    (r"=\s*[+-]?0\d", "write numbers without leading zeros"),
    (r"=\s*[A-Za-z/~.]", 'put text in quotes: key = "text"'),
    (r"^\s*[\w.-]+\s*(#.*)?$", "write key = value"),
)


def _syntax_remedy(line: str, column: int) -> str | None:
    line = line.rstrip("\r")
    for pattern, remedy in _HINTS:
        if re.search(pattern, line):
            return remedy
    if 0 < column <= len(line) and line[column - 1] == "\t":
        return "there is a tab character here: remove it"
    return None


_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN_VALUE = re.compile(r"[^,\]}#\n]+")
_STRINGS = {  # opening quotes -> the whole string; up to two quotes may stand right before the closing three
    '"""': re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL),
    "'''": re.compile(r"'''.*?'{3,5}", re.DOTALL),
    '"': re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    "'": re.compile(r"'[^'\n]*'"),
}


class _Scanner:
    """Walks a document and notes the line of every key, table and array element.

    Raises ValueError where the text is not TOML as far as it cares; `lines`, `statement_line` (where the last
    statement began) and `twice` (path, first line, second line of a key given twice) hold what it saw until then.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.statement_line = 1
        self.lines: dict[KeyPath, int] = {}
        self.twice: tuple[KeyPath, int, int] | None = None
        self.table: KeyPath = ()
        self._breaks = [match.start() for match in re.finditer("\n", text)]
        self._array_tables: dict[KeyPath, int] = {}
        self._explicit: set[KeyPath] = set()

    def scan(self) -> None:
        while True:
            self._skip(_BLANK)
            if self.pos >= len(self.text):
                return
            self.statement_line = self._line()
            if self.text[self.pos] == "[":
                self._header()
            else:
                self._pair(self.table)

    def _header(self) -> None:
        line = self._line()
        is_array = self.text.startswith("[[", self.pos)
        self.pos += 2 if is_array else 1
        keys = self._key()
        path: KeyPath = ()
        for key in keys[:-1]:
            path = (*path, key)
            self.lines.setdefault(path, line)
            if path in self._array_tables:  # [a.b] below [[a]] means the last a
                path = (*path, self._array_tables[path] - 1)
        path = (*path, keys[-1])
        if not is_array and path in self._array_tables:
            self._note_twice(path, line)
        if is_array:
            count = self._array_tables.get(path, 0)
            if path in self._explicit:  # [a] and then [[a]]
                self._note_twice(path, line)
            self._array_tables[path] = count + 1
            self.lines.setdefault(path, line)
            path = (*path, count)
        self._define(path, line)
        self.lines[path] = line  # an explicit header is a better place than a mention in another's name
        self.table = path
        self._expect("]]" if is_array else "]")

    def _pair(self, base: KeyPath) -> None:
        line = self._line()
        path = base
        for key in self._key():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self._define(path, line)
        self._expect("=")
        self._skip(_SPACE)
        self._value(path)

    def _define(self, path: KeyPath, line: int) -> None:
        if path in self._explicit:
            self._note_twice(path, line)
        self._explicit.add(path)

    def _note_twice(self, path: KeyPath, line: int) -> None:
        if self.twice is None:
            self.twice = (path, self.lines[path], line)

    def _key(self) -> list[str]:
        keys = []
        while True:
            self._skip(_SPACE)
            quoted = self._string()
            if quoted is None:
                match = _BARE_KEY.match(self.text, self.pos)
                if match is None:
                    raise ValueError("no key")
                self.pos = match.end()
                keys.append(match[0])
            else:
                keys.append(str(_toml.loads(f"key = {quoted}")["key"]))
            self._skip(_SPACE)
            if not self.text.startswith(".", self.pos):
                return keys
            self.pos += 1

    def _value(self, path: KeyPath) -> None:
        if self.text.startswith("[", self.pos):
            self._array(path)
        elif self.text.startswith("{", self.pos):
            self._inline_table(path)
        elif self._string() is None:
            match = _PLAIN_VALUE.match(self.text, self.pos)
            if match is None:
                raise ValueError("no value")
            self.pos = match.end()

    def _array(self, path: KeyPath) -> None:
        self.pos += 1
        index = 0
        while True:
            self._skip(_BLANK)
            if self.text.startswith("]", self.pos):
                self.pos += 1
                return
            element = (*path, index)
            self.lines[element] = self._line()
            self._value(element)
            index += 1
            self._separator("]")

    def _inline_table(self, path: KeyPath) -> None:
        self.pos += 1
        while True:
            self._skip(_BLANK)
            if self.text.startswith("}", self.pos):
                self.pos += 1
                return
            self._pair(path)
            self._separator("}")

    def _separator(self, closing: str) -> None:
        self._skip(_BLANK)
        if not self.text.startswith(closing, self.pos):
            self._expect(",")

    def _string(self) -> str | None:
        for opening, whole in _STRINGS.items():
            if self.text.startswith(opening, self.pos):
                match = whole.match(self.text, self.pos)
                if match is None:
                    raise ValueError("text without an end")
                self.pos = match.end()
                return match[0]
        return None

    def _expect(self, token: str) -> None:
        if not self.text.startswith(token, self.pos):
            raise ValueError(f"no {token}")
        self.pos += len(token)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.pos)
        if match is not None:
            self.pos = match.end()

    def _line(self) -> int:
        return bisect_left(self._breaks, self.pos) + 1
