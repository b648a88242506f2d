"""Multipart: the same events however a body is cut, and nothing collected but short fields."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.rest.multipart import (
    MAX_FIELD_BYTES,
    MAX_HEADER_BYTES,
    Event,
    Field,
    FileData,
    FilePart,
    MultipartReader,
    boundary_of,
)
from services.kit.wire.errors import InvalidRequestError

BOUNDARY = b"x-1"

# Content that comes close to a boundary, over and over.
near_boundary = st.lists(
    st.sampled_from([b"\r", b"\n", b"--", b"x-1", b"\r\n--x-", b"\r\n--x-2", b"a", b"\0", b"\xff"])
).map(b"".join)
contents = (st.binary(max_size=300) | near_boundary).filter(
    # RFC 2046: the separator, alone or as the start of a line, cannot stand in a part.
    lambda content: b"\r\n--x-1" not in b"\r\n" + content
)
names = st.text(
    st.characters(codec="utf-8", exclude_characters='"\\\r\n\0%', exclude_categories=["Cc"]),
    min_size=1,
    max_size=40,
)
fields = st.tuples(names, st.text(max_size=50).filter(lambda text: "--x-1" not in text))
parts = st.lists(st.tuples(names, names, contents) | fields, max_size=6)
cuts = st.lists(st.integers(0, 3000), max_size=12)

Part = tuple[str, str] | tuple[str, str, bytes]


def body_of(form: list[Part]) -> bytes:
    """Return a form as raw bytes."""
    out = b""
    for part in form:
        head = f'Content-Disposition: form-data; name="{part[0]}"'
        value = part[1].encode()
        if len(part) == 3:
            head += f'; filename="{part[1]}"\r\nContent-Type: application/octet-stream'
            value = part[2]
        out += b"--x-1\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n"
    return out + b"--x-1--\r\n"


def read(body: bytes, places: list[int]) -> list[Event]:
    """Return the events of a body that arrives cut at `places`, file data joined."""
    reader = MultipartReader(BOUNDARY)
    edges = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    events: list[Event] = []
    for start, end in itertools.pairwise(edges):
        for event in reader.feed(body[start:end]):
            last = events[-1] if events else None
            if isinstance(event, FileData) and isinstance(last, FileData):
                events[-1] = FileData(last.data + event.data)
            else:
                events.append(event)
    reader.close()
    return events


def expected(form: list[Part]) -> list[Event]:
    """Return the events that a form must make."""
    events: list[Event] = []
    for part in form:
        if len(part) == 3:
            events.append(FilePart(part[0], part[1]))
            if part[2]:
                events.append(FileData(part[2]))
        else:
            events.append(Field(part[0], part[1]))
    return events


@given(form=parts, places=cuts)
def test_any_cut_gives_the_same_events(form: list[Part], places: list[int]) -> None:
    assert read(body_of(form), places) == expected(form)


@given(form=parts, places=cuts, end=st.integers(0, 3000))
def test_a_body_that_breaks_off_is_refused(form: list[Part], places: list[int], end: int) -> None:
    body = body_of(form)
    # Without its last line end a form is still whole.
    body = body[: end % (len(body) - 2)]
    with pytest.raises(InvalidRequestError):
        read(body, places)


@given(body=st.binary(max_size=500), places=cuts)
def test_noise_is_refused_and_never_crashes(body: bytes, places: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        read(body, places)


def test_field_is_bounded() -> None:
    head = b'--x-1\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
    reader = MultipartReader(BOUNDARY)
    reader.feed(head + b"v" * MAX_FIELD_BYTES)
    with pytest.raises(InvalidRequestError, match="longer than"):
        reader.feed(b"v" * 100)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"Content-Type: text/plain",
        b"Content-Disposition: form-data",
        b'Content-Disposition: attachment; name="file"',
        b"X: " + b"y" * (MAX_HEADER_BYTES + 1),
        b"bad header",
    ],
)
def test_part_without_a_name_is_refused(head: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        MultipartReader(BOUNDARY).feed(b"--x-1\r\n" + head + b"\r\n\r\nx\r\n--x-1--\r\n")


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (b"a%22b", 'a"b'),
        (b"a%0D%0Ab", "a\r\nb"),
        (b"100%25", "100%25"),
        (b"a%20b", "a%20b"),
        (b"a\\\\b", "a\\b"),
        ("ü☃".encode(), "ü☃"),
    ],
)
def test_names_are_as_clients_write_them(sent: bytes, meant: str) -> None:
    head = b'--x-1\r\nContent-Disposition: form-data; name="file"; filename="' + sent
    events = MultipartReader(BOUNDARY).feed(head + b'"\r\n\r\n')
    assert events == [FilePart("file", meant)]


@pytest.mark.parametrize("sent", [b'name="file"; filename="\xff"', b'name="\xe9"'])
def test_names_that_are_not_utf8_are_refused(sent: bytes) -> None:
    head = b"--x-1\r\nContent-Disposition: form-data; " + sent
    with pytest.raises(InvalidRequestError, match=r"'\\x(ff|e9)' in the .* not UTF-8 text"):
        MultipartReader(BOUNDARY).feed(head + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (b"filename*=UTF-8''na%C3%AFve%20%E2%98%83.jsonl", "naïve ☃.jsonl"),
        (b"filename*=utf-8'en'a%22b", 'a"b'),
        (b"filename*=iso-8859-1''%E9", "é"),
        (b"filename=\"=?utf-8?B?w6k=?=\"; filename*=utf-8''%C3%A9", "é"),
        (b"filename=\"x\"; filename*=utf-8''%FF", "x"),
        (b"filename=\"x\"; filename*=no-such''%41", "x"),
        (b"filename=\"a; filename*=utf-8''b\"", "a; filename*=utf-8''b"),
    ],
)
def test_names_in_the_extended_form_are_read(sent: bytes, meant: str) -> None:
    head = b'--x-1\r\nContent-Disposition: form-data; name="file"; ' + sent
    events = MultipartReader(BOUNDARY).feed(head + b"\r\n\r\n")
    assert events == [FilePart("file", meant)]


def test_the_longest_name_of_wide_characters_fits() -> None:
    name = "🌙" * 4_096
    head = f'--x-1\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    assert MultipartReader(BOUNDARY).feed(head.encode()) == [FilePart("file", name)]


@given(st.binary(max_size=60))
def test_any_extended_name_is_read_or_passed_over(raw: bytes) -> None:
    value = raw.replace(b"\r", b"").replace(b"\n", b"")
    head = b'--x-1\r\nContent-Disposition: form-data; name="file"; filename*=' + value
    try:
        events = MultipartReader(BOUNDARY).feed(head + b"\r\n\r\n")
    except InvalidRequestError:
        return
    assert len(events) <= 1


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=x",
        f"multipart/form-data; boundary={'x' * 71}",
    ],
)
def test_content_type_without_a_form_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidRequestError):
        boundary_of(content_type)


def test_quoted_boundary() -> None:
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="a b"') == b"a b"
