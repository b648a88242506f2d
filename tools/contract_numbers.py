"""Lists which of the public contract's 100 assertions have no test.

A test names what it shows in a comment right above it: `# contract: 7` or `# contract: 7, 21`.
Several such lines may stand there, with decorators between them and the test. The assertions are
those of the contract's section 12, "Black-box checklist".

    contract_numbers.py         say which numbers no test names; exit status 1 where there are any
    contract_numbers.py --all   say for each number which tests name it
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
NUMBERS = range(1, 101)

TAG = re.compile(r"\s*#\s*contract:\s*(\d+(?:\s*,\s*\d+)*)\s*$")
MENTION = re.compile(r"\s*#\s*contract:")


class MisplacedTagError(ValueError):
    """A comment that looks like a tag and is none, or stands above no test."""


def numbers_of(source: str, where: str) -> dict[str, set[int]]:
    """Return the numbers that each test function of a module names.

    Args:
        source: the module's text.
        where: what messages call it.

    Raises:
        MisplacedTagError: a tag is misspelt, names a number that does not exist, or stands above
            nothing that is a test.
    """
    lines = source.splitlines()
    found: dict[str, set[int]] = {}
    taken: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.name.startswith("test_"):
            continue
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        above = first - 1
        while above > 0 and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        for number in range(above, node.lineno - 1):
            match = TAG.match(lines[number])
            if match:
                taken.add(number)
                found.setdefault(node.name, set()).update(map(int, match[1].split(",")))
    for number, line in enumerate(lines):
        if MENTION.match(line) and number not in taken:
            raise MisplacedTagError(f"{where}:{number + 1}: not above a test, or misspelt: {line}")
    for name, numbers in found.items():
        if not numbers <= set(NUMBERS):
            raise MisplacedTagError(f"{where}: {name} names {sorted(numbers - set(NUMBERS))}")
    return found


def tests_by_number(tests: Path = TESTS) -> dict[int, list[str]]:
    """Return the tests that name each number, as `path::test`, relative to the checkout.

    Raises:
        MisplacedTagError: as for `numbers_of`.
    """
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        if "node_modules" in path.parts:
            continue
        where = str(path.relative_to(tests.parent))
        for name, numbers in numbers_of(path.read_text(), where).items():
            for number in numbers:
                found[number].append(f"{where}::{name}")
    return found


def main(arguments: list[str]) -> int:
    """Print what was asked for; returns the exit status."""
    found = tests_by_number()
    if "--all" in arguments:
        for number in NUMBERS:
            print(f"{number:3}  {', '.join(found.get(number, ['no test']))}")
    missing = [number for number in NUMBERS if number not in found]
    if missing:
        print(f"no test names: {', '.join(map(str, missing))}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
