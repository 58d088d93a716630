"""Camera addresses: what they resolve to, and that they are shown without credentials."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import UsageError
from edge_runtime.source_url import parse_source, redact_url

BASE = Path("/base")


@pytest.mark.parametrize(
    ("url", "kind", "location"),
    [
        ("clip.mp4", "file", "/base/clip.mp4"),
        ("a/b@c 1.mp4", "file", "/base/a/b@c 1.mp4"),
        ("/data/10:30.mp4", "file", "/data/10:30.mp4"),
        ("file:clip.mp4", "file", "/base/clip.mp4"),
        ("file:/data/100%25.mp4", "file", "/data/100%25.mp4"),
        ("file:///data/a%20b.mp4", "file", "/data/a b.mp4"),
        ("FILE://localhost/x", "file", "/x"),
        ("bundled:vtest", "bundled", "vtest"),
        ("https://u:p@h:8443/s?a=1", "http", "https://u:p@h:8443/s?a=1"),
        ("http://[::1]:80/s", "http", "http://[::1]:80/s"),
        ("rtsps://h/1", "rtsp", "rtsps://h/1"),
        ("v4l2:/dev/video0", "v4l2", "/dev/video0"),
        ("csi:0", "csi", "0"),
        ("synthetic:", "synthetic", ""),
    ],
)
def test_sources(url: str, kind: str, location: str) -> None:
    source = parse_source(url, BASE)
    assert (source.kind, source.location) == (kind, location)
    assert parse_source(source.url, Path("/elsewhere")) == source
    assert source.is_recording == (kind in ("file", "bundled"))


@pytest.mark.parametrize("url", ["csi:x", "csi:", "v4l2:0", "bundled:", " clip.mp4", "a\tb", "file://x", "http:", "~x"])
def test_refused_with_a_remedy(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source(url, BASE)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h/s.mjpg", "http://h/s.mjpg"),
        ("http://h/s?channel=1", "http://h/s?channel=1"),
        ("rtsp://u:p@h/1", "rtsp://***@h/1"),
        ("rtsp://u:p@w/x?y#z@h/1", "rtsp://***@h/1"),
        ("http://h/s?user=a&pwd=b&channel=1", "http://h/s?user=***&pwd=***&channel=1"),
        ("http://h/s?usr=a&pw=b&credential=c&channel=1", "http://h/s?usr=***&pw=***&credential=***&channel=1"),
        ("rtsp://h/user=a_password=b_channel=1", "rtsp://h/user=***"),
        ("http://h/s?X-Auth-Token=b;c d", "http://h/s?X-Auth-Token=***"),
        ("u:p@h/1", "***@h/1"),
        ("/data/a:b@c.mp4", "/data/a:b@c.mp4"),
        ("file:a@b.mp4", "file:a@b.mp4"),
        ("gate@1", "gate@1"),
        ("", ""),
    ],
)
def test_redaction(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    assert redact_url(shown) == shown


@given(
    scheme=st.sampled_from(["http", "https", "rtsp", "rtsps", "rtmp", "HTTP"]),
    password=st.text(st.characters(min_codepoint=33, max_codepoint=0x24F), max_size=12).map(
        lambda text: f"S3{text}cr3t"
    ),
    tail=st.sampled_from(["h/1", "10.0.0.9:554/x?channel=1", "[::1]/", ""]),
)
def test_a_password_of_any_characters_is_never_shown(scheme: str, password: str, tail: str) -> None:
    url = f"{scheme}://admin:{password}@{tail}"
    assert "S3" not in redact_url(url)
    assert "cr3t" not in redact_url(url)
    said = ""
    try:
        source = parse_source(url, BASE)
        said = f"{source!r} {source.shown}"
    except UsageError as error:
        said = str(error)
    assert "S3" not in said
    assert "cr3t" not in said
