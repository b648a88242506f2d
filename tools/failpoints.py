"""Lists the steps at which a process may die, and fails on one that is not named, told and tried.

A step leaves something durable: a row, a blob, a message, a file of its own, a line in an engine.
Each has a name, which stands in the code, once, as a literal. This reads the code and says

- which call of a blob, the database, the broker, the engine or the store passes no failpoint,
- which name stands twice,
- which name is missing in the table of docs/durability.md ("Crash windows"), or stands there though
  no code has it,
- which name no test dies at, and which no test stands still at.

    failpoints.py         say what is wrong; exit status 1 where anything is
    failpoints.py --all   list the steps with where they are

A test says what it tries by a decorator: `windows("a.step", …)`, or `kills` or `freezes` where it
does one of both (tests/integration/crash_windows/stories.py, or `pytest.mark`).
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ROOT / "services"
TESTS = ROOT / "tests"
TABLE = ROOT / "docs" / "durability.md"
HEADING = "## Crash windows"

STEP = re.compile(r"[a-z_]+(\.[a-z_]+)+")
ROW = re.compile(r"^\| `([^`]+)` ", re.MULTILINE)

NO_WRITE_PATH = (
    # Read only.
    "store/checkup",
    "store/domain",
    "gateway",
    # Made by a person's command, before anything runs.
    "executor/small_model.py",
    "cli/commands/demo.py",
    # Foreign code behind `engine.submit`.
    "executor/engines",
)
"""Parts of services/ that leave nothing durable behind."""

SEAMS = (
    "kit/process/failpoints.py",
    "store/db/database.py",
    "store/db/writer.py",
    "store/db/postgres.py",
    "store/db/sqlite.py",
    "store/blobs",
    "store/migrations",
)
"""What takes the step's name as an argument, or is what a named step consists of."""

WHOLE = ("store/db/migrate.py", "store/backup", "store/snapshot")
"""Modules whose transactions are parts of one step with a name: nobody uses what they make before
it is finished."""

BROKER = frozenset(
    {
        "ack",
        "ack_sync",
        "add_consumer",
        "add_stream",
        "create_key_value",
        "delete",
        "delete_consumer",
        "delete_stream",
        "in_progress",
        "nak",
        "publish",
        "purge_stream",
        "put",
        "term",
        "update_stream",
    }
)
"""Calls that change something at the broker, on what `BROKER_OBJECTS` names."""
BROKER_OBJECTS = re.compile(r"(^|\.|_)(jetstream|client|message|bucket)$")
FILES = frozenset({"hardlink_to", "rename", "replace", "symlink_to", "unlink", "write_text"})
"""Calls that make or end a file, in `FILE_MODULES`."""
FILE_MODULES = ("kit/secret_file.py", "cli/shared/datadir.py")
READ_CALLS = frozenset({"GetWindow", "ReadLines", "AppendResults"})
"""Calls of the store that change nothing, and the stream whose frames are steps themselves."""


@dataclass
class Found:
    """What a module's code holds: where each step is, and what passes none."""

    steps: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    faults: list[str] = field(default_factory=list)


def steps_of(source: str, where: str) -> Found:
    """Return the steps of a module.

    Args:
        source: its text.
        where: its path below services/.
    """
    reader = _Reader(where)
    reader.visit(ast.parse(source))
    return reader.found


class _Reader(ast.NodeVisitor):
    def __init__(self, where: str) -> None:
        self.found = Found()
        self._where = where
        # Names of the steps around what is looked at.
        self._around: list[str] = []
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self._pairs: dict[str, set[str]] = defaultdict(set)

    def visit_Module(self, node: ast.Module) -> None:
        self.generic_visit(node)
        for step, places in self._pairs.items():
            # `before` alone is a place inside of a larger step.
            if "before" not in places:
                self._fault(node, f"{step} has no place before it")

    def visit_With(self, node: ast.With) -> None:
        self._within(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self._within(node)

    def _within(self, node: ast.With | ast.AsyncWith) -> None:
        opened = 0
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _text(call.func) == "failpoints.around":
                name = _literal(call)
                # Where the name is an argument, the caller's call is what is looked at.
                if name is not None:
                    self._name(call, name)
                opened += 1
                self._around.append(name or "")
            else:
                self.visit(item)
        for statement in node.body:
            self.visit(statement)
        if opened:
            del self._around[-opened:]

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = _text(node.func)
        receiver, _, method = called.rpartition(".")
        if called in {"failpoints.before", "failpoints.after"}:
            self._half(node, method)
        elif self._is_seam(node, receiver, method):
            names = [_literal(node)] if _literal(node) else self._listed(node)
            if not names:
                self._fault(node, f"{called}() is not given the name of a step")
            for name in names:
                self._name(node, str(name))
        elif self._needs_step(receiver, method, called) and not self._around:
            self._fault(node, f"{called}() passes no failpoint")

    def _is_seam(self, node: ast.Call, receiver: str, method: str) -> bool:
        if not receiver:
            # A helper, and a class, whose first argument is the step's name.
            return (method == "_write" and self._where in FILE_MODULES) or method == "Copier"
        if re.search(r"(^|\.|_)db$", receiver):
            return method == "write"
        # Without arguments it is a statement on the table of that name.
        return (
            method in {"put", "delete"}
            and bool(node.args)
            and bool(re.search(r"(^|\.|_)blobs$", receiver))
        )

    def _listed(self, node: ast.Call) -> list[str]:
        """The names in a list that is gone through, each first in its tuple."""
        if not (node.args and isinstance(node.args[0], ast.Name) and self._functions):
            return []
        firsts = (
            each.elts[0]
            for each in ast.walk(self._functions[-1])
            if isinstance(each, ast.Tuple) and each.elts
        )
        return [
            first.value
            for first in firsts
            if isinstance(first, ast.Constant)
            and isinstance(first.value, str)
            and STEP.fullmatch(first.value)
        ]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()

    def _needs_step(self, receiver: str, method: str, called: str) -> bool:
        if not self._where.startswith(WHOLE):
            if re.search(r"(^|\.|_)db$", receiver) and method == "run":
                return True
            if method == "begin" and "engine" in receiver:
                return True
        if method in BROKER and BROKER_OBJECTS.search(receiver) and self._where.startswith("kit/"):
            return True
        if called == "submitted" and self._where != "executor/lines/stand_in_answers.py":
            return True
        if receiver.endswith("._stub") and self._where.startswith(("executor/", "scheduler/")):
            return method not in READ_CALLS
        return self._where in FILE_MODULES and method in FILES and receiver != "unfinished"

    def _half(self, node: ast.Call, place: str) -> None:
        name = _literal(node)
        if name is None:
            return
        if not self._pairs[name]:
            self._name(node, name)
        self._pairs[name].add(place)

    def _name(self, node: ast.AST, name: str) -> None:
        if not STEP.fullmatch(name):
            self._fault(node, f"{name!r} is no name of a step")
        self.found.steps[name].append(f"{self._where}:{getattr(node, 'lineno', 0)}")

    def _fault(self, node: ast.AST, text: str) -> None:
        self.found.faults.append(f"services/{self._where}:{getattr(node, 'lineno', 0)}: {text}")


def _text(node: ast.expr) -> str:
    return ast.unparse(node)


def _literal(call: ast.Call) -> str | None:
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    return None


def in_services(services: Path = SERVICES) -> Found:
    """Return the steps of all services."""
    all_found = Found()
    for path in sorted(services.rglob("*.py")):
        where = path.relative_to(services).as_posix()
        if where.startswith((*NO_WRITE_PATH, *SEAMS)):
            continue
        found = steps_of(path.read_text(), where)
        all_found.faults += found.faults
        for step, places in found.steps.items():
            all_found.steps[step] += places
    return all_found


def in_table(text: str) -> list[str]:
    """Return the steps that the document lists, in order."""
    _, _, section = text.partition(f"{HEADING}\n")
    section = section.partition("\n## ")[0]
    return ROW.findall(section)


def tried_in(source: str) -> dict[str, set[str]]:
    """Return the steps that a module of tests dies and stands still at: `kills`, `freezes`."""
    found: dict[str, set[str]] = {"kills": set(), "freezes": set()}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call):
                continue
            name = _text(decorator.func).rpartition(".")[2]
            steps = {str(arg.value) for arg in decorator.args if isinstance(arg, ast.Constant)}
            for kind in found:
                if name in {kind, "windows"}:
                    found[kind] |= steps
    return found


def in_tests(tests: Path = TESTS) -> dict[str, set[str]]:
    """Return the steps that any test dies and stands still at."""
    all_found: dict[str, set[str]] = {"kills": set(), "freezes": set()}
    for path in sorted(tests.rglob("test_*.py")):
        if "node_modules" in path.parts:
            continue
        for kind, steps in tried_in(path.read_text()).items():
            all_found[kind] |= steps
    return all_found


def faults(found: Found, table: Iterable[str], tried: dict[str, set[str]]) -> Iterator[str]:
    """Say all that is wrong, a line each."""
    yield from found.faults
    listed = list(table)
    for step, places in sorted(found.steps.items()):
        if len(places) > 1:
            yield f"{step}: named more than once, in {', '.join(places)}"
        if step not in listed:
            yield f"{step}: not in the table of docs/durability.md ({places[0]})"
        if step not in tried["kills"]:
            yield f"{step}: no test dies there ({places[0]})"
        if step not in tried["freezes"]:
            yield f"{step}: no test stands still there ({places[0]})"
    for step in sorted(set(listed) - found.steps.keys()):
        yield f"{step}: in docs/durability.md, and no code has it"
    for step in sorted({each for each in listed if listed.count(each) > 1}):
        yield f"{step}: twice in docs/durability.md"
    for step in sorted((tried["kills"] | tried["freezes"]) - found.steps.keys()):
        yield f"{step}: tried by a test, and no code has it"


def main(arguments: list[str]) -> int:
    """Print what was asked for; returns the exit status."""
    found = in_services()
    if "--all" in arguments:
        for step, places in sorted(found.steps.items()):
            print(f"{step:28} {', '.join(places)}")
    wrong = list(faults(found, in_table(TABLE.read_text()), in_tests()))
    for each in wrong:
        print(each, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
