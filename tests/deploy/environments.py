"""Every container that compose or Nomad starts, with the environment that it gets."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.deploy import files


@dataclass(frozen=True, slots=True)
class Container:
    """One container of ours: where it is described, its service and its image's target."""

    where: str
    service: str
    target: str
    environment: dict[str, str]

    def __str__(self) -> str:
        """Name it in a test's id."""
        return f"{self.where}-{self.target}"


def containers() -> list[Container]:
    """Return all containers of our images that deploy/ describes."""
    return [*_of_compose(), *_of_nomad()]


def _container(where: str, target: str, environment: dict[str, Any]) -> Container:
    service = target.partition("-")[0]
    return Container(where, service, target, files.image_environment(target) | environment)


def _of_compose() -> Iterator[Container]:
    for one in files.our_services().values():
        yield _container("compose", one["build"]["target"], one["environment"])


def _of_nomad() -> Iterator[Container]:
    for group in files.nomad_groups().values():
        for task in files.labelled(group["task"]).values():
            image = files.filled_in(task["config"][0]["image"])
            if not image.startswith("nightshift-") or image.startswith("nightshift-nats:"):
                continue
            environment = {name: files.filled_in(it) for name, it in task["env"][0].items()}
            for template in task.get("template", ()):
                if template.get("env"):
                    # Addresses that are known at run time only.
                    found = re.findall(r"(?m)^\s*(\w+)=(\S*)\{\{", template["data"])
                    environment |= {name: f"{start}192.0.2.1:4711" for name, start in found}
            target = image.removeprefix("nightshift-").partition(":")[0]
            yield _container("nomad", target, environment)
