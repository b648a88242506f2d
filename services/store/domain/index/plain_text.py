"""What a line's bytes are as text, before anyone asks whether they are JSON."""


def is_utf8(line: bytes) -> bool:
    """Whether all of it decodes, so that no surrogate and no overlong form is in it."""
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_blank(line: bytes) -> bool:
    """Whether an editor shows nothing: white space only, of whatever script."""
    rest = line.strip()
    if not rest:
        return True
    # Nearly every line, told without a copy of it.
    if 0x20 < rest[0] < 0x7F:
        return False
    try:
        return not rest.decode().strip()
    except UnicodeDecodeError:
        return False
