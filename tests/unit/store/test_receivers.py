"""Whose webhook is sent next: shares hold, nobody starves, what is prompt waits for no slow one."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.store.domain import receivers
from services.store.domain.receivers import Receivers, Waiting

pytestmark = pytest.mark.unit

ALL = [
    Waiting(project_id=f"p{project}", endpoint_id=f"p{project}e{number}")
    for project in range(9)
    for number in range(6)
]


class Sending(RuleBasedStateMachine):
    """Attempts begin and end; endpoints are prompt, slow or hang, each as long as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.receivers = Receivers()
        self.now = 0.0
        self.sending: list[Waiting] = []
        self.prompt: set[Waiting] = set()
        self.hung: Counter[Waiting] = Counter()
        self.paused: dict[Waiting, float] = {}
        #: Projects by when an attempt of theirs began last.
        self.served: dict[str, int] = {}

    @rule(seed=st.integers(0, 2**16), count=st.sampled_from([1, 10, len(ALL)]))
    def turn(self, seed: int, count: int) -> None:
        """Begin what is chosen of some that wait."""
        waiting = set(random.Random(seed).sample(ALL, count))
        before = dict(self.served)
        chosen = self.receivers.choose(sorted(waiting, key=lambda one: one.endpoint_id), self.now)
        assert len(waiting & set(chosen)) == len(chosen)
        assert all(self.paused.get(one, 0) <= self.now for one in chosen)
        for at, one in enumerate(chosen):
            self.receivers.begin(one)
            self.sending.append(one)
            self.served[one.project_id] = max(self.served.values(), default=0) + at + 1
        self._nobody_is_passed_over(chosen, waiting - set(chosen), before)

    def _nobody_is_passed_over(
        self, chosen: list[Waiting], passed_over: set[Waiting], before: dict[str, int]
    ) -> None:
        of_project = Counter(one.project_id for one in self.sending)
        unsure = Counter(one.project_id for one in self.sending if one not in self.prompt)
        for one in passed_over:
            if self.paused.get(one, 0) > self.now or of_project[one.project_id] >= 8:
                continue
            if one in self.prompt:
                # Only its own attempts, or prompt ones in the slots kept for them, are before it.
                assert self.sending.count(one) >= 4 or len(self.sending) == 32
            elif not self.sending.count(one) and unsure[one.project_id] < 4:
                assert unsure.total() >= 24 or len(self.sending) == 32
                # A project that gets nothing has waited no longer than any that gets such a slot.
                if all(one.project_id != each.project_id for each in chosen):
                    last = before.get(one.project_id, 0)
                    got = {each.project_id for each in chosen if each not in self.prompt}
                    assert all(before.get(each, 0) <= last for each in got)

    @precondition(lambda self: self.sending)
    @rule(data=st.data(), seconds=st.sampled_from([0.1, 6.0, 15.0]), answered=st.booleans())
    def end(self, data: st.DataObject, seconds: float, answered: bool) -> None:
        """End one attempt."""
        one = self.sending.pop(data.draw(st.integers(0, len(self.sending) - 1)))
        self.now += 0.5
        pause = self.receivers.end(one, seconds=seconds, answered=answered, now=self.now)
        hangs = seconds >= receivers.PROMPT_SECONDS and not answered
        self.hung[one] = self.hung[one] + 1 if hangs else 0
        (self.prompt.add if seconds < receivers.PROMPT_SECONDS else self.prompt.discard)(one)
        assert (pause > 0) == (self.hung[one] >= receivers.HUNG_TIMES)
        assert pause <= receivers.LONGEST_PAUSE_SECONDS
        self.paused[one] = self.now + pause

    @rule(seconds=st.sampled_from([1.0, 60.0, 400.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    @invariant()
    def shares_hold(self) -> None:
        """No project has more than its share, whatever its endpoints do."""
        assert len(self.sending) <= receivers.SLOTS
        of_project = Counter(one.project_id for one in self.sending)
        assert all(count <= receivers.OF_PROJECT for count in of_project.values())
        of_endpoint = Counter(self.sending)
        assert all(count <= receivers.OF_PROMPT_ENDPOINT for count in of_endpoint.values())


TestSending = Sending.TestCase
TestSending.settings = settings(max_examples=25, stateful_step_count=30)


def test_however_many_hang_slots_are_left_for_who_answers() -> None:
    known, prompt = Receivers(), Waiting(project_id="bob", endpoint_id="prompt")
    known.begin(prompt)
    known.end(prompt, seconds=0.1, answered=True, now=0)
    for _ in range(9):
        for one in known.choose(ALL, 0):
            known.begin(one)
    assert known.choose([*ALL, prompt], 0) == [prompt]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "MOST_KNOWN", 3)
    known = Receivers()
    for one in ALL:
        known.begin(one)
        known.end(one, seconds=15, answered=False, now=0)
    assert len(known._known) == 3
