"""What Schemathesis loads into its own process: some requests ask for objects that there are.

Ids made up by a generator are unknown ones; half of them are replaced by those of
`NIGHTSHIFT_FUZZ_IDS`, a JSON object of lists by the parameter's name, so that the routes behind
them are reached, too. An upload's part stands in `part_ids` where the upload stands in
`upload_id`. No webhook leads off this machine.
"""

import json
import os
import random
from typing import Any, Final

import schemathesis

NOWHERE: Final = "http://127.0.0.1:9/webhook"

_IDS: Final[dict[str, list[str]]] = json.loads(os.environ.get("NIGHTSHIFT_FUZZ_IDS", "{}"))
_CHANCE: Final = random.Random(0)


def _or_known(name: str, value: Any) -> Any:
    if name in _IDS and _CHANCE.random() < 0.5:
        return _CHANCE.choice(_IDS[name])
    return value


def _parts(path: Any, value: Any) -> Any:
    upload = path.get("upload_id") if isinstance(path, dict) else None
    if upload in _IDS.get("upload_id", ()):
        return [_IDS["part_ids"][_IDS["upload_id"].index(upload)]]
    return value


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Change a request before it is sent."""
    if isinstance(case.path_parameters, dict):
        for name, value in case.path_parameters.items():
            case.path_parameters[name] = _or_known(name, value)
    if isinstance(case.body, dict):
        for name, value in case.body.items():
            if name == "part_ids":
                case.body[name] = _parts(case.path_parameters, value)
            elif name == "url":
                case.body[name] = NOWHERE
            else:
                case.body[name] = _or_known(name, value)


__all__ = ["before_call"]
