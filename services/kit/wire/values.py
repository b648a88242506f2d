"""How many values a JSON text holds, counted without building one of them.

A few bytes can stand for a value that takes a hundred times their size once it is parsed. What
parses a user's text counts first.
"""

import re
from collections.abc import Iterator
from typing import Final

import numpy as np

MOST_VALUES: Final = 50_000
"""Entries of all arrays and objects of a text, but for `MOST_NUMBERS`; an empty one counts as one
entry."""
MOST_NUMBERS: Final = 300_000
"""Numbers that are entries of arrays, such as the token ids of a prompt."""

_WINDOW_BYTES: Final = 65_536
_STRING_BYTES: Final = 512
"""A text whose strings are longer on average is told by going from quote to quote."""
_BLANKS: Final = b" \t\r\n"
_NUMBER: Final = re.compile(rb"[\[,][-0-9]")


def too_many_values(
    *texts: bytes | bytearray,
    most_values: int = MOST_VALUES,
    most_numbers: int = MOST_NUMBERS,
    window_bytes: int = _WINDOW_BYTES,
) -> bool:
    """Whether texts hold more values than they may together.

    Exact for JSON. Of what is no JSON the part before the fault is counted, which is all that a
    parser builds of it. Looks at `window_bytes` at a time, so that other threads run between.
    """
    # No text has more values than bytes outside of strings, nor than marks. Both are quick to tell.
    for most_in in (len, _bytes_outside, _marks):
        if sum(map(most_in, texts)) <= most_values:
            return False
    values = numbers = 0
    for text in texts:
        before = b""
        for outside in _outside_strings(text, window_bytes):
            found = len(_NUMBER.findall(before + outside))
            before = outside[-1:] or before
            numbers += found
            values += outside.count(b",") + outside.count(b"{") + outside.count(b"[") - found
            # The entry that has just begun may be a number.
            if values - (before in (b"[", b",")) > most_values or numbers > most_numbers:
                return True
    return False


def _bytes_outside(text: bytes | bytearray) -> int:
    """Bytes outside of strings; all bytes where the strings are short."""
    outside = position = 0
    inside = False
    for _ in range(len(text) // _STRING_BYTES):
        quote = text.find(b'"', position)
        if quote < 0:
            return outside if inside else outside + len(text) - position
        if not inside:
            outside += quote - position
            inside = True
        elif text[quote - 1] == ord("\\"):
            before = text[max(0, quote - 16) : quote]
            run = len(before) - len(before.rstrip(b"\\"))
            if run == len(before):
                break
            inside = run % 2 == 1
        else:
            inside = False
        position = quote + 1
    return len(text)


def _marks(text: bytes | bytearray) -> int:
    """Commas and openings of arrays and objects, as quickly as they can be counted."""
    count = 0
    characters = np.frombuffer(text, np.uint8)
    for start in range(0, len(characters), _WINDOW_BYTES):
        window = characters[start : start + _WINDOW_BYTES]
        # "[" and "{" differ in one bit.
        count += int(np.count_nonzero(window == ord(",")))
        count += int(np.count_nonzero(window | 32 == ord("{")))
    return count


def _outside_strings(text: bytes | bytearray, window_bytes: int) -> Iterator[bytes]:
    """The text window by window, without its strings and white space."""
    inside = 0
    open_escape = b""
    for start in range(0, len(text), window_bytes):
        window = open_escape + text[start : start + window_bytes]
        open_escape = b""
        # Outside of strings there is no backslash.
        if b"\\" in window:
            window = window.replace(b"\\\\", b"")
            if window.endswith(b"\\"):
                open_escape, window = b"\\", window[:-1]
            window = window.replace(b'\\"', b"")
        pieces = window.split(b'"')
        if len(pieces) > 1 or not inside:
            yield b"".join(pieces[inside::2]).translate(None, _BLANKS)
        inside ^= (len(pieces) - 1) & 1
