"""Steps without a name, a row, or a test are told; ours have all of them."""

import pytest

from tools.failpoints import (
    TABLE,
    Found,
    faults,
    in_services,
    in_table,
    in_tests,
    steps_of,
    tried_in,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("where", "source", "steps"),
    [
        ("store/x.py", "await self._context.db.write('a.b', f)", ["a.b"]),
        ("store/x.py", "await context.blobs.put('a.b', name, data)", ["a.b"]),
        ("store/x.py", "await self._blobs.delete('a.b', *names)", ["a.b"]),
        (
            "kit/x.py",
            "with failpoints.around('a.b'):\n    await self._jetstream.publish(s)",
            ["a.b"],
        ),
        ("executor/x.py", "with failpoints.around('a.b'):\n    self._stub.Beat(m)", ["a.b"]),
        ("store/x.py", "failpoints.before('a.b')\nx()\nfailpoints.after('a.b')", ["a.b"]),
        (
            "store/x.py",
            "async def f():\n for a, b in (('a.b', 1), ('a.c', 2)):\n  await self.db.write(a, b)",
            ["a.b", "a.c"],
        ),
        # A statement on a table, a read, and a stream whose frames are steps themselves.
        ("store/x.py", "connection.execute(blobs.delete().where(x))", []),
        ("store/x.py", "await self._context.db.read(f)", []),
        ("executor/x.py", "self._stub.AppendResults(m)", []),
    ],
)
def test_names_are_read_off_the_code(where: str, source: str, steps: list[str]) -> None:
    found = steps_of(source, where)
    assert found.faults == []
    assert sorted(found.steps) == steps


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("store/x.py", "await self._context.db.write(step, f)"),
        ("store/x.py", "await self._context.db.write(lambda connection: 1)"),
        ("store/x.py", "await context.blobs.put(name, data)"),
        ("store/x.py", "db.run(f)"),
        ("store/x.py", "with self._engine.begin() as connection: ..."),
        ("kit/x.py", "await self._jetstream.publish(s)"),
        ("kit/x.py", "await self.message.ack_sync()"),
        ("kit/x.py", "await bucket.put(k, v)"),
        ("executor/x.py", "await self._stub.Beat(m)"),
        ("executor/lines/runner.py", "submitted(engine, requests)"),
        ("cli/shared/datadir.py", "path.unlink()"),
        ("store/x.py", "failpoints.after('a.b')"),
        ("store/x.py", "failpoints.around('a.b')\nself._db.write('NotAName', f)"),
    ],
)
def test_a_call_without_a_name_is_told(where: str, source: str) -> None:
    assert steps_of(source, where).faults


def test_tests_say_what_they_try() -> None:
    source = """
@stories.windows("a.b", "a.c")
async def story(world): ...
@pytest.mark.kills("a.d")
@pytest.mark.freezes("a.e")
def test_it(): ...
"""
    assert tried_in(source) == {"kills": {"a.b", "a.c", "a.d"}, "freezes": {"a.b", "a.c", "a.e"}}


def test_only_the_rows_of_the_section_count() -> None:
    text = (
        "| `a.a` |\n## Crash windows\n\n| step |\n|---|\n| `a.b` | x |\n\n## Next\n| `a.c` | x |\n"
    )
    assert in_table(text) == ["a.b"]


def test_what_is_missing_anywhere_is_told() -> None:
    found = Found()
    found.steps["a.b"] = ["x:1", "y:2"]
    told = "\n".join(faults(found, ["a.c", "a.c"], {"kills": {"a.d"}, "freezes": set()}))
    for fault in (
        "a.b: named more than once",
        "a.b: not in the table",
        "a.b: no test dies there",
        "a.b: no test stands still there",
        "a.c: in docs/durability.md, and no code has it",
        "a.c: twice in docs/durability.md",
        "a.d: tried by a test, and no code has it",
    ):
        assert fault in told


def test_each_of_our_steps_is_named_listed_and_tried() -> None:
    assert list(faults(in_services(), in_table(TABLE.read_text()), in_tests())) == []
