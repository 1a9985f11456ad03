"""Check the prose of library and service: openers of docstrings, and words that have a plainer one."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("dcp", "planners", "storage", "server")

_QUESTION = re.compile(r"(What|Whether|Which|How|Where|When|Who|Whose|Why|That|Those)\b")
_NOUN = re.compile(r"(The|A|An)\b")
_WORDS = re.compile(r"(?i)\b(told|tells? of|of ours|of others|somebody|goes on|go on|what there is)\b")


_ALSO = {
    "server": re.compile(r"(?i)\b(nobody|everybody|anybody|of theirs|that is about|that are about|dear)\b")
}
"""Words that some folders alone do without."""


def docstring_problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for docstrings without a verb or noun at the beginning."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in [one for one in ast.walk(tree) if isinstance(one, kinds)]:
        text = ast.get_docstring(node) or ""
        line = node.body[0].lineno if node.body else 1
        if opener := _QUESTION.match(text):
            yield line, f"a docstring begins with {opener[0]!r}: begin with a verb or a noun"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (opener := _NOUN.match(text)):
            is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
            if not is_property and not node.name.startswith("test_"):  # of a test it says what holds
                yield line, f"a function's docstring begins with {opener[0]!r}: begin with a verb"


def word_problems(source: str, folder: str = "") -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for words of comments and strings of ``folder`` that have a plainer one."""
    patterns = [_WORDS, *([_ALSO[folder]] if folder in _ALSO else [])]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for found in [one for pattern in patterns for one in pattern.finditer(token.string)]:
                line = token.start[0] + token.string.count("\n", 0, found.start())
                yield line, f"{found[0]!r}: say it in the words of the field's documentation"


def main() -> int:
    """Print every problem with its place, and return 1 if there is one."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in Path(folder).rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents):
            source = path.read_text(encoding="utf-8")
            problems = sorted([*docstring_problems(ast.parse(source)), *word_problems(source, path.parts[0])])
            found += [f"{path}:{line}: {problem}" for line, problem in problems]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
