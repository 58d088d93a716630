"""The line of every key, over generated documents whose lines are known as they are written."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import ConfigError
from edge_runtime.toml_source import KeyPath, key_text, parse_toml

# ---- by hand

TRICKY = '''\
# a = 1
"a" = "x # not = a comment" # b = 2
text = """
a = 5
[table]
\\""" still = inside """"   # and "this" is a comment
raw = \'\'\'
it's = 'raw'
[[x]]\'\'\'\'
list = [ # ] no end
  1, [2, "]"], # , ]
  {p = 1, "q.r" = {s = 2}},
]
when = 1979-05-27 07:32:00
"d.e".f.'g h' = 3

[ table . "sub.one" ]   # [other]
\tk\t=\t'#'
[[x.y]]
k = 1
[[x.y.z]]
k = {a.b = 1, c = [
  1,
  2]}
[x.y.w]
k = 1
[[x.y]]
[x.y.w]
k = "\\"k = 2"
[x]
"\\u006B" = ""
'''

LINES: dict[KeyPath, int] = {
    ("a",): 2,
    ("text",): 3,
    ("raw",): 7,
    ("list",): 10,
    ("list", 0): 11,
    ("list", 1, 1): 11,
    ("list", 2, "p"): 12,
    ("list", 2, "q.r", "s"): 12,
    ("when",): 14,
    ("d.e",): 15,
    ("d.e", "f", "g h"): 15,
    ("table", "sub.one"): 17,
    ("table", "sub.one", "k"): 18,
    ("x", "y"): 19,
    ("x", "y", 0): 19,
    ("x", "y", 0, "k"): 20,
    ("x", "y", 0, "z", 0): 21,
    ("x", "y", 0, "z", 0, "k", "a", "b"): 22,
    ("x", "y", 0, "z", 0, "k", "c", 1): 24,
    ("x", "y", 0, "w"): 25,
    ("x", "y", 0, "w", "k"): 26,
    ("x", "y", 1): 27,
    ("x", "y", 1, "w", "k"): 29,
    ("x",): 30,
    ("x", "k"): 31,
}


def paths_of(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    """Every key and element of a parsed document."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    found = [path] if path else []
    for key, child in items:
        found += paths_of(child, (*path, key))
    return found


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_tricky_document(line_end: str) -> None:
    source = parse_toml(TRICKY.replace("\n", line_end), "t.toml")
    assert set(source.lines) == set(paths_of(source.data))
    for path, line in LINES.items():
        assert source.line_of(path) == line, path


def test_a_place_that_does_not_exist_is_its_tables() -> None:
    source = parse_toml(TRICKY, "t.toml")
    assert source.line_of(("x", "y", 1, "none")) == 27
    assert source.line_of(("none",)) is None
    assert source.line_of(()) is None


def test_keys_as_the_operator_says_them() -> None:
    assert key_text(("camera", 2, "fps")) == "camera[3].fps"
    assert key_text(("a b", 'c"d\n', "é")) == '"a b"."c\\"d\\n"."\\xe9"'


# ---- generated: a writer that notes the line of what it writes


class Writer:
    """Writes TOML in the form it is told to and knows where each key went."""

    def __init__(self) -> None:
        self.text = ""
        self.lines: dict[KeyPath, int] = {}

    @property
    def line(self) -> int:
        return self.text.count("\n") + 1

    def note(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.line)


KEYS = st.one_of(
    st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True),
    st.sampled_from(["a.b", "#", "[x]", "=", 'q"q', "it's", "", " ", "\\", "\t", "é", '"""', "]]"]),
)
NOISE = st.sampled_from(["", "\n", "# key = 1\n", "  # [table]\n", '# """\n', "\t\n\n", "# '''\n"])
SCALARS = st.sampled_from(
    [
        "1",
        "-0.5e3",
        "true",
        "inf",
        "1979-05-27 07:32:00",
        "07:32:00",
        '"#"',
        "'\\'",
        '"a\\"b = 1"',
        '""',
        "''",
        '"""\n[[t]]\na = 1\n"""',
        '"""a""""',
        '""""a"""',
        '"""""""',
        '"""\\\n   \\""" x = 1 """',
        "'''\n# x\n'''''",
        "''''a'''",
        "'''\\'''",
        '"]}"',
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(st.tuples(NOISE, inner), max_size=3).map(lambda items: ("list", items)),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda items: ("table", list(items.items()))),
    ),
    max_leaves=5,
)


def quoted(key: str, style: int) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", key) and style % 3 == 0:
        return key
    if "'" not in key and style % 3 == 1:
        return f"'{key}'"
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def write_value(writer: Writer, path: KeyPath, value: Any, style: int) -> None:
    if isinstance(value, str):
        writer.text += value
    elif value[0] == "list":
        writer.text += "["
        for index, (noise, item) in enumerate(value[1]):
            writer.text += ("," if index else "") + noise
            writer.note((*path, index))
            write_value(writer, (*path, index), item, style)
        writer.text += ",\n]" if value[1] and style % 2 else "]"
    else:
        writer.text += "{"
        for index, (key, item) in enumerate(value[1]):
            writer.text += ", " if index else " "
            writer.note((*path, key))
            writer.text += f"{quoted(key, style)}={' ' * (style % 2)}"
            write_value(writer, (*path, key), item, style)
        writer.text += " }"


def write_pairs(writer: Writer, base: KeyPath, pairs: list[Any]) -> None:
    for key, (noise, value, style, dotted) in pairs:
        writer.text += noise + "\t" * (style % 2)
        path = (*base, key)
        writer.note(path)
        writer.text += quoted(key, style)
        if dotted is not None:  # key.dotted = value
            path = (*path, dotted)
            writer.note(path)
            writer.text += f" . {quoted(dotted, style + 1)}" if style % 2 else f".{quoted(dotted, style + 1)}"
        writer.text += " = "
        write_value(writer, path, value, style)
        writer.text += " # end = 1\n" if style % 2 else "\n"


PAIRS = st.dictionaries(KEYS, st.tuples(NOISE, VALUES, st.integers(0, 5), st.one_of(st.none(), KEYS)), max_size=3).map(
    lambda pairs: list(pairs.items())
)
TABLES = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), NOISE, PAIRS, st.one_of(st.none(), st.tuples(KEYS, PAIRS))), max_size=6
)


DOCUMENTS = given(root=PAIRS, tables=TABLES, crlf=st.booleans())


@settings(max_examples=60, deadline=None)
@DOCUMENTS
def test_the_line_of_every_key(root: list[Any], tables: list[Any], crlf: bool) -> None:
    check_lines(root, tables, crlf)


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@DOCUMENTS
def test_the_line_of_every_key_of_many_documents(root: list[Any], tables: list[Any], crlf: bool) -> None:
    check_lines(root, tables, crlf)


def check_lines(root: list[Any], tables: list[Any], crlf: bool) -> None:
    writer = Writer()
    write_pairs(writer, (), [(f"root {key}", pair) for key, pair in root])
    counts: dict[str, int] = {}
    for number, (group, is_array, noise, pairs, below) in enumerate(tables):
        writer.text += noise
        if is_array:
            name = f"many-{group}"
            writer.note((name,))
            path: KeyPath = (name, counts.setdefault(name, 0))
            counts[name] += 1
            header = f"[[{name}]]" if group % 2 else f' [[ "{name}" ]] # [[x]]'
        else:
            name = f"one-{number}"
            path, header = (name,), f"[{name}]"
        writer.note(path)
        writer.text += header + "\n"
        write_pairs(writer, path, [(f"k{key}", pair) for key, pair in pairs])
        if below is not None:
            writer.note((*path, "below"))
            writer.note((*path, "below", below[0]))
            writer.text += f"[{name}.below.{quoted(below[0], 2)}]\n"
            write_pairs(writer, (*path, "below", below[0]), below[1])
    text = writer.text.replace("\n", "\r\n") if crlf else writer.text
    source = parse_toml(text, "g.toml")
    assert set(source.lines) == set(paths_of(source.data))
    assert source.lines == writer.lines


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab.=[]{}\"'#\n\r\t ,1-\\é"), max_size=40))
def test_any_text_is_a_document_or_a_problem_with_a_line(text: str) -> None:
    try:
        source = parse_toml(text, "g.toml")
    except ConfigError as error:
        (problem,) = error.problems
        assert problem.line is not None
        assert 1 <= problem.line <= text.count("\n") + 1
    else:
        assert set(source.lines) == set(paths_of(source.data))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('a = 1\nb = """x\n\n\nc = 2\n', 2, "not TOML"),
        ("a = [1,\n2\n\n", 1, "not TOML"),
        ("a = 1\n\n[t]\nb = 1\nb = 2\n", 5, "given twice, first on line 4"),
        ("[t]\n[u]\n[t]\n", 3, "given twice, first on line 1"),
        ("[[t]]\n[t]\n", 2, "given twice, first on line 1"),
        ("t = {a = 1, b = 2,\n a = 3}\n", 1, ""),
        ("a = 1\rb = 2\n", 1, "not TOML"),
    ],
)
def test_syntax_errors_have_the_line_to_look_at(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_toml(text, "g.toml")
    (problem,) = caught.value.problems
    assert message in problem.message
    assert problem.line == line or not message
