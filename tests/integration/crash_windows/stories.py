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
    """Run a test for each of these steps, as its argument `step`; something dies at its places."""
    return pytest.mark.parametrize("step", steps)


def freezes(*steps: str) -> pytest.MarkDecorator:
    """Run a test for each of these steps, as its argument `step`; something stops at its places."""
    return pytest.mark.parametrize("step", steps)


def armed(step: str, action: str) -> str:
    """Return the setting that has both places of a step act."""
    return ";".join(f"{step}:{at}={action}" for at in BOTH)


@dataclass(frozen=True)
class _Told:
    story: Story
    places: tuple[str, ...]


class Stories:
    """The stories of one module of tests; `tools/failpoints.py` reads the decorators.

    All places of a story act in one telling, each once, in the order in which they are come to.
    """

    def __init__(self) -> None:
        self._all: dict[str, _Told] = {}

    def windows(self, *steps: str, places: tuple[str, ...] = BOTH) -> Callable[[Story], Story]:
        """Tell this story with a store that dies at these steps, and with stores that stop there.

        Args:
            steps: names.
            places: before the step, after it, or both.
        """

        def add(story: Story) -> Story:
            name = story.__name__
            before = self._all[name].places if name in self._all else ()
            more = tuple(f"{step}:{at}" for step in steps for at in places)
            self._all[name] = _Told(story, before + more)
            return story

        return add

    def names(self) -> list[str]:
        """The names of the stories."""
        return list(self._all)

    async def killed(self, name: str, template: Template, folder: Path) -> None:
        """Tell a story at whose places the store dies, one after the other."""
        told = self._all[name]
        await World(template, folder, action="kill", places=told.places).play(told.story)

    async def frozen(self, name: str, template: Template, folder: Path, backing: Backing) -> None:
        """Tell a story at whose places a store stands still, one store after the other."""
        told = self._all[name]
        world = World(template, folder, action="freeze", places=told.places, backing=backing)
        await world.play(told.story)
