"""Halves of surrogate pairs in JSON, as JavaScript writes them for an emoji that was cut in two."""

import re

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u([dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
_MAX_ESCAPES = 10_000


def repaired(body: bytes) -> bytes:
    """Return a JSON text with U+FFFD for each half of a surrogate pair; the same object if it has none."""
    if _SURROGATE.search(body) is None or body.count(b"\\") > _MAX_ESCAPES:
        return body
    text = _ESCAPE.sub(lambda found: found[0] if found[1] is None else b"\\ufffd", body)
    return body if text == body else text
