"""The list of stories: which steps each of them comes to, and how it is told."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.integration.crash_windows.world import Backing, Check, World
from tests.kit.template import Template

Story = Callable[[World], Awaitable[Check]]


@dataclass(frozen=True)
class _Told:
    step: str
    story: Story
    kills: bool
    freezes: bool


class Stories:
    """The stories of one module of tests."""

    def __init__(self) -> None:
        self._all: list[_Told] = []

    def windows(self, *steps: str) -> Callable[[Story], Story]:
        """Tell this story once for each step that dies, and twice for each that stands still."""
        return self._add(steps, kills=True, freezes=True)

    def kills(self, *steps: str) -> Callable[[Story], Story]:
        """Tell it for each step that dies."""
        return self._add(steps, kills=True, freezes=False)

    def freezes(self, *steps: str) -> Callable[[Story], Story]:
        """Tell it for each step that stands still."""
        return self._add(steps, kills=False, freezes=True)

    def _add(
        self, steps: tuple[str, ...], *, kills: bool, freezes: bool
    ) -> Callable[[Story], Story]:
        def add(story: Story) -> Story:
            self._all += [_Told(step, story, kills, freezes) for step in steps]
            return story

        return add

    def to_kill(self) -> list[str]:
        """The steps to die at."""
        return [each.step for each in self._all if each.kills]

    def to_freeze(self) -> list[str]:
        """The places to stand still at."""
        return [f"{each.step}:{at}" for each in self._all if each.freezes for at in _PLACES]

    async def killed(self, step: str, template: Template, folder: Path) -> None:
        """Tell the story of a step at whose places the store dies, first before, then after it."""
        (told,) = (each for each in self._all if each.step == step and each.kills)
        places = tuple(f"{step}:{at}" for at in _PLACES)
        await World(template, folder, action="kill", places=places).play(told.story)

    async def frozen(self, place: str, template: Template, folder: Path, backing: Backing) -> None:
        """Tell the story of a place at which the store stands still."""
        step, _, _ = place.partition(":")
        (told,) = (each for each in self._all if each.step == step and each.freezes)
        world = World(template, folder, action="freeze", places=(place,), backing=backing)
        await world.play(told.story)

    def __iter__(self) -> Iterator[str]:
        """Walk over the steps."""
        return iter(each.step for each in self._all)


_PLACES: Final = ("before", "after")
