"""The list of stories: which steps each of them comes to, and how it is told."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.integration.crash_windows.world import Backing, Check, World
from tests.kit.template import Template

Story = Callable[[World], Awaitable[Check]]
BOTH: Final = ("before", "after")


def kills(*steps: str) -> pytest.MarkDecorator:
    """Run a test for each place of these steps, as its argument `place`; it dies there."""
    return _at_places(steps)


def freezes(*steps: str) -> pytest.MarkDecorator:
    """Run a test for each place of these steps, as its argument `place`; it stands still there."""
    return _at_places(steps)


def _at_places(steps: tuple[str, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("place", [f"{step}:{at}" for step in steps for at in BOTH])


@dataclass(frozen=True)
class _Told:
    story: Story
    places: tuple[str, ...]


class Stories:
    """The stories of one module of tests; `tools/failpoints.py` reads the decorators."""

    def __init__(self) -> None:
        self._to_kill: dict[str, _Told] = {}
        self._to_freeze: dict[str, _Told] = {}

    def windows(self, *steps: str, places: tuple[str, ...] = BOTH) -> Callable[[Story], Story]:
        """Tell this story of each step, for a store that dies there and for one that stands still.

        Args:
            steps: names.
            places: before the step, after it, or both.
        """
        return self._add(steps, places, self._to_kill, self._to_freeze)

    def kills(self, *steps: str, places: tuple[str, ...] = BOTH) -> Callable[[Story], Story]:
        """Tell it for a store that dies."""
        return self._add(steps, places, self._to_kill)

    def freezes(self, *steps: str, places: tuple[str, ...] = BOTH) -> Callable[[Story], Story]:
        """Tell it for a store that stands still."""
        return self._add(steps, places, self._to_freeze)

    def _add(
        self, steps: tuple[str, ...], places: tuple[str, ...], *lists: dict[str, _Told]
    ) -> Callable[[Story], Story]:
        def add(story: Story) -> Story:
            for each in lists:
                each.update(dict.fromkeys(steps, _Told(story, places)))
            return story

        return add

    def to_kill(self) -> list[str]:
        """The steps to die at."""
        return list(self._to_kill)

    def to_freeze(self) -> list[str]:
        """The places to stand still at."""
        return [f"{step}:{at}" for step, told in self._to_freeze.items() for at in told.places]

    async def killed(self, step: str, template: Template, folder: Path) -> None:
        """Tell the story of a step at whose places the store dies, one after the other."""
        told = self._to_kill[step]
        places = tuple(f"{step}:{at}" for at in told.places)
        await World(template, folder, action="kill", places=places).play(told.story)

    async def frozen(self, place: str, template: Template, folder: Path, backing: Backing) -> None:
        """Tell the story of a place at which the store stands still."""
        told = self._to_freeze[place.partition(":")[0]]
        world = World(template, folder, action="freeze", places=(place,), backing=backing)
        await world.play(told.story)
