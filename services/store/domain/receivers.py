"""Whose webhook is sent next: projects in turn, their endpoints in turn, each with a share.

Sending is done in slots. A receiver that does not answer holds its slot for as long as an attempt
may take, so that what hangs is kept to a part of the slots.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

SLOTS: Final = 32
"""Attempts at once, in one store."""
OF_PROJECT: Final = 8
OF_PROMPT_ENDPOINT: Final = 4
"""Attempts at once to an endpoint whose last one was prompt; one to any other."""
UNSURE_SLOTS: Final = 24
"""Attempts at once to all endpoints not known as prompt; the rest is kept for prompt ones."""
UNSURE_OF_PROJECT: Final = 4

PROMPT_SECONDS: Final = 4.0
"""An attempt that ends within this time is prompt, whatever came of it: it held a slot briefly."""
HUNG_TIMES: Final = 3
"""After so many attempts in a row that hung an endpoint gets one attempt after each pause."""
FIRST_PAUSE_SECONDS: Final = 15.0
LONGEST_PAUSE_SECONDS: Final = 300.0
MOST_KNOWN: Final = 10_000
"""Endpoints of which something is remembered; the longest unused is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An endpoint to which something is to be sent now."""

    project_id: str
    endpoint_id: str


@dataclass(slots=True)
class _Known:
    """What is known of an endpoint since the store began."""

    prompt: bool = False
    hung: int = 0
    paused_until: float = 0.0
    turn: int = 0


@dataclass(slots=True)
class _Held:
    """Slots that are held, by whom."""

    endpoints: Counter[str] = field(default_factory=Counter)
    projects: Counter[str] = field(default_factory=Counter)
    unsure: int = 0
    unsure_of: Counter[str] = field(default_factory=Counter)

    def add(self, one: Waiting, *, prompt: bool) -> None:
        self.endpoints[one.endpoint_id] += 1
        self.projects[one.project_id] += 1
        if not prompt:
            self.unsure += 1
            self.unsure_of[one.project_id] += 1

    def has_room(self, one: Waiting, *, prompt: bool) -> bool:
        if self.projects.total() >= SLOTS or self.projects[one.project_id] >= OF_PROJECT:
            return False
        if prompt:
            return self.endpoints[one.endpoint_id] < OF_PROMPT_ENDPOINT
        return (
            not self.endpoints[one.endpoint_id]
            and self.unsure < UNSURE_SLOTS
            and self.unsure_of[one.project_id] < UNSURE_OF_PROJECT
        )


class Receivers:
    """How endpoints behave, what is being sent to them, and whose turn it is."""

    def __init__(self) -> None:
        """Know nothing of any endpoint."""
        self._known: OrderedDict[str, _Known] = OrderedDict()
        # As many as there are projects, which only operators make.
        self._turns: Counter[str] = Counter()
        self._turn = 0
        self._sending: Counter[Waiting] = Counter()

    def choose(self, waiting: Iterable[Waiting], now: float) -> list[Waiting]:
        """Return which of these endpoints get an attempt now, each once, in order.

        Args:
            waiting: each endpoint once.
            now: seconds of a clock that never jumps.
        """
        held = self._held()
        lines: dict[str, deque[Waiting]] = {}
        for one in sorted(waiting, key=self._longest_without):
            if self._of(one).paused_until <= now:
                lines.setdefault(one.project_id, deque()).append(one)
        chosen = []
        while lines:
            for project_id, line in list(lines.items()):
                one = line.popleft()
                while line and not held.has_room(one, prompt=self._of(one).prompt):
                    one = line.popleft()
                if held.has_room(one, prompt=self._of(one).prompt):
                    held.add(one, prompt=self._of(one).prompt)
                    chosen.append(one)
                if not line:
                    del lines[project_id]
        return chosen

    def begin(self, one: Waiting) -> None:
        """Note that an attempt begins; its project and its endpoint go to the end of the line."""
        self._turn += 1
        self._turns[one.project_id] = self._turn
        self._remember(one.endpoint_id).turn = self._turn
        self._sending[one] += 1

    def end(self, one: Waiting, *, seconds: float, answered: bool, now: float) -> float:
        """Note that an attempt ended; return for how many seconds the endpoint is paused now."""
        self._sending[one] -= 1
        if not self._sending[one]:
            del self._sending[one]
        known = self._remember(one.endpoint_id)
        known.prompt = seconds < PROMPT_SECONDS
        known.hung = 0 if known.prompt or answered else known.hung + 1
        pause = 0.0
        if known.hung >= HUNG_TIMES:
            # 2**10 is beyond the longest already.
            pause = FIRST_PAUSE_SECONDS * 2 ** min(known.hung - HUNG_TIMES, 10)
            pause = min(pause, LONGEST_PAUSE_SECONDS)
        known.paused_until = now + pause
        return pause

    def hangs(self, endpoint_id: str) -> bool:
        """Tell whether an endpoint gets one attempt after each pause only."""
        known = self._known.get(endpoint_id)
        return known is not None and known.hung >= HUNG_TIMES

    def forget(self, endpoint_id: str) -> None:
        """Take an endpoint for a new one: it was changed, or answered outside of this."""
        self._known.pop(endpoint_id, None)

    def _held(self) -> _Held:
        held = _Held()
        for one in self._sending.elements():
            held.add(one, prompt=self._of(one).prompt)
        return held

    def _longest_without(self, one: Waiting) -> tuple[int, int]:
        return self._turns[one.project_id], self._of(one).turn

    def _of(self, one: Waiting) -> _Known:
        return self._known.get(one.endpoint_id) or _Known()

    def _remember(self, endpoint_id: str) -> _Known:
        known = self._known.setdefault(endpoint_id, _Known())
        self._known.move_to_end(endpoint_id)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return known
