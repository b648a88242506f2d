"""Lists which of the public contract's 100 assertions have no test.

A test names what it shows in a comment right above it: `# contract: 7` or `# contract: 7, 21`.
Several such lines may stand there, with decorators between them and the test. The assertions are
those of the contract's section 12, "Black-box checklist".

    contract_numbers.py         say which numbers no test names; exit status 1 where there are any
    contract_numbers.py --all   say for each number which tests name it
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
NUMBERS = range(1, 101)

TAG = re.compile(r"#\s*contract:\s*(\d+(?:\s*,\s*\d+)*)\s*$")
MENTION = re.compile(r"#\s*contract:")


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
    comments = _comments(source)
    found: dict[str, set[int]] = {}
    taken: set[int] = set()
    for name, above in _heads(ast.parse(source), comments):
        for number in above:
            match = TAG.match(comments.get(number, ""))
            if match:
                taken.add(number)
                found.setdefault(name, set()).update(map(int, match[1].split(",")))
    for number, comment in comments.items():
        if MENTION.match(comment) and number not in taken:
            raise MisplacedTagError(f"{where}:{number}: not above a test, or misspelt: {comment}")
    for name, numbers in found.items():
        if not numbers <= set(NUMBERS):
            raise MisplacedTagError(f"{where}: {name} names {sorted(numbers - set(NUMBERS))}")
    return found


def _comments(source: str) -> dict[int, str]:
    """Return the comments by line, from 1; what stands in a string is none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def _heads(tree: ast.Module, comments: dict[int, str]) -> Iterator[tuple[str, range]]:
    """Yield each test with the lines, from 1, of its decorators and the comments above."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("test_"):
            above = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            while above - 1 in comments:
                above -= 1
            yield node.name, range(above, node.lineno)


def named_in(tests: Path) -> dict[int, list[str]]:
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
    found = named_in(TESTS)
    if "--all" in arguments:
        for number in NUMBERS:
            print(f"{number:3}  {', '.join(found.get(number, ['no test']))}")
    missing = [number for number in NUMBERS if number not in found]
    if missing:
        print(f"no test names: {', '.join(map(str, missing))}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
