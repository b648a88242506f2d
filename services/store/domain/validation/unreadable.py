"""What keeps a line from being JSON, and what to change: the parser's finding, and advice.

Advice is guessed from where the parser stopped; where nothing fits, its finding stands alone.
"""

from typing import Final

import orjson

NOT_JSON: Final = "This line is not parseable as valid JSON."

_BLANKS: Final = " \t\r\n"
_BOM: Final = "\ufeff"
_HALF_A_CHARACTER: Final = (
    "An escape such as \\ud83d alone is half a character; write the whole pair or the character "
    "itself"
)
_NO_NUMBER: Final = ("NaN", "Infinity")
_OTHER_LITERALS: Final = ("None", "True", "False", "undefined", "nil")
_ROUND_QUOTES: Final = "\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb"


def unreadable(raw: bytes, error: orjson.JSONDecodeError) -> str:
    """The message for a line that `error` was raised for; it quotes nothing of the line."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as undecodable:
        return (
            f"{NOT_JSON} It is not valid UTF-8: byte {raw[undecodable.start]:#04x} at position "
            f"{undecodable.start + 1}. Save the file as UTF-8."
        )
    finding, advice = _explained(text, error.pos, error.msg)
    said = f"{NOT_JSON} {finding} (column {error.colno})."
    return f"{said} {advice}" if advice else said


def _explained(text: str, at: int, said: str) -> tuple[str, str]:
    """What was found at a character of the line, and what to change; the latter may be empty."""
    if text[at : at + 10].lstrip("-").startswith(_NO_NUMBER):
        return "NaN and Infinity are not JSON", "Write null, or leave the field out."
    if "infinity" in said:
        return "This number is too large", "At most 1.79e308 can be written."
    if "surrogate" in said:
        return _HALF_A_CHARACTER, ""
    return said[:1].upper() + said[1:], _advice(text, at, said)


def _advice(text: str, at: int, said: str) -> str:
    start = text.lstrip(_BLANKS)
    rest = text[at:].lstrip()
    if start.startswith(_BOM):
        return "Remove the mark: it may only be the first thing in the file."
    if not start.startswith("{"):
        return "A request begins with '{': remove this line, or what stands before its '{'."
    if "after document" in said:
        return _advice_behind(rest)
    if "end of data" in said:
        return (
            "The object is not closed: write all of a request on one line, and a line break "
            "inside a text as \\n."
        )
    if "control character" in said:
        return f"Write it as the escape \\u{ord(text[at : at + 1] or ' '):04x}."
    if "depth" in said:
        return "Nest it less deeply: 1024 levels are allowed."
    if "escape" in said:
        return "Write a backslash inside a text as \\\\."
    return _advice_on_token(text, at, said)


def _advice_behind(rest: str) -> str:
    """Advice on what follows the object."""
    if rest.rstrip() == ",":
        return "Remove the comma: only the line's end separates requests."
    if rest.lstrip(", \t").startswith("{"):
        return "Write each request on a line of its own."
    return "Remove what follows the object."


def _advice_on_token(text: str, at: int, said: str) -> str:
    """Advice on a key or value that is none."""
    mark = text[at : at + 1] or " "
    if mark in _ROUND_QUOTES:
        return 'Write straight double quotes (").'
    if mark == "'" or "string key" in said:
        return "Write keys and texts in double quotes."
    if text.startswith(_OTHER_LITERALS, at):
        return "Write null, true or false."
    if "expected ','" in said and '"' in text[max(0, at - 1) : at + 1]:
        return 'Write a quote inside a text as \\", and a comma between two fields.'
    return ""
