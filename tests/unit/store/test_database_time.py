"""The database's time, and from when on a silent executor is a dead one."""

from collections.abc import Callable

import pytest

from services.kit.process.clock import ManualClock
from services.store.db.clock import GIVEN_UP, DatabaseTime
from services.store.db.leases import Leases

START = 1_000_000.0
AHEAD = 500.0
"""By how much the database's clock is ahead of this machine's."""


class Server:
    """A database whose clock is another one, looked at each second."""

    def __init__(self) -> None:
        self.clock = ManualClock(START)
        self.set_by = AHEAD
        self.time = DatabaseTime(self.clock)
        self.look()

    def look(self, *, slow_seconds: float = 0.0) -> None:
        self.time.look_regularly()
        asked = self.time.carried()
        says = self.clock.monotonic() + self.set_by
        self.clock.advance(slow_seconds)
        self.time.observe(says, asked=asked)

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1)
            self.look()

    @property
    def silent_seconds(self) -> float:
        """How long ago hearing began anew."""
        return (self.time.now_ms() - self.time.heard_since_ms) / 1000


@pytest.fixture
def server() -> Server:
    return Server()


def test_time_is_the_databases_and_goes_on_between_looks(server: Server) -> None:
    assert server.time.now_ms() == (START + AHEAD) * 1000
    server.clock.advance(0.25)
    assert server.time.now_ms() == (START + AHEAD + 0.25) * 1000


def test_this_machines_clock_may_be_set_without_harm(server: Server) -> None:
    before = server.time.now_ms()
    server.clock.set_by(-3_600)
    server.look()
    assert server.time.now_ms() == before


def test_hearing_begins_with_the_start_and_goes_on(server: Server) -> None:
    server.pass_seconds(100)
    assert server.silent_seconds == 100


def silence(server: Server) -> None:
    server.clock.advance(10)
    server.look()


def set_ahead(server: Server) -> None:
    server.set_by += 60
    server.look()


def set_back(server: Server) -> None:
    server.set_by -= 60
    server.look()


def unwritten(server: Server) -> None:
    server.time.faulty(server.time.carried())
    server.pass_seconds(3)


@pytest.mark.parametrize("fault", [silence, set_ahead, set_back, unwritten])
def test_hearing_begins_anew_after(server: Server, fault: Callable[[Server], None]) -> None:
    server.pass_seconds(100)
    fault(server)
    assert server.silent_seconds == 0


def drift(server: Server) -> None:
    server.set_by += 0.5
    server.look()


def short(server: Server) -> None:
    server.clock.advance(3)
    server.look()


def repeated(server: Server) -> None:
    server.time.faulty(server.time.carried())
    server.look()
    server.time.written()
    server.pass_seconds(3)


@pytest.mark.parametrize("nothing", [drift, short, repeated])
def test_hearing_goes_on_through(server: Server, nothing: Callable[[Server], None]) -> None:
    server.pass_seconds(100)
    nothing(server)
    assert server.silent_seconds >= 100


def test_an_answer_that_took_long_says_nothing_about_time(server: Server) -> None:
    server.pass_seconds(10)
    server.look(slow_seconds=1.5)
    assert server.time.now_ms() == (server.clock.monotonic() + AHEAD) * 1000


@pytest.mark.parametrize(
    ("until_ms", "heard_since_ms", "end_ms"),
    [
        (20_000, 0, 20_000),
        # It beat before: the store could not hear it until 12,000.
        (20_000, 12_000, 27_000),
        # It beat since.
        (28_000, 12_000, 28_000),
        (GIVEN_UP, 12_000, GIVEN_UP),
    ],
)
def test_a_lease_lasts_until_its_holder_could_be_heard(
    until_ms: int, heard_since_ms: int, end_ms: int
) -> None:
    leases = Leases(lease_ms=15_000, heard_since_ms=heard_since_ms)
    assert leases.end_ms(until_ms) == end_ms
