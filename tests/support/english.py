"""Check the prose of code and pages: openers of docstrings, words with plainer synonyms, sentences, length.

``python -m tests.support.english`` prints every problem with its place; ``--measure`` prints the figures of
each page and package instead. docs/contributing.md has the rules.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = ("dcp", "planners", "storage", "server")
"""Folders whose docstrings, comments, and other strings are checked."""
AROUND: Final = ("tests", "benchmarks", "tools", "examples")
"""Folders whose docstrings and comments are checked; other strings may be data, such as `WORDS`."""
GENERATED: Final = "docs/reference/generated"

MOST_WORDS: Final = 25_000
"""Words of README, CHANGELOG and docs outside of code blocks and generated pages."""
MOST_A_SENTENCE: Final = 40
MOST_VAGUE: Final = 6.0
"""Vague words (`VAGUE`) of 100, of a page. Documentation of torch, fsspec and httpx has 2 to 3."""
MOST_VAGUE_OF_DOCSTRINGS: Final = 8.0

_QUESTION: Final = re.compile(r"(What|Whether|Which|How|Where|When|Who|Whose|Why|That|Those)\b")
_NOUN: Final = re.compile(r"(The|A|An)\b")
WORDS: Final = re.compile(
    r"(?i)\b(told|tells? of|of ours|of others|of theirs|somebody|nobody|everybody|anybody|goes on|go on|"
    r"going on|what there is|that is about|that are about|is about|dear|as ever|be it)\b"
)
"""Words and phrases with a plainer synonym."""
VAGUE: Final = re.compile(
    r"(?i)\b(what|that|those|it|its|one|ones|such|there|else|otherwise|so|who|whose|whether|theirs|ours|others)\b"
)
"""Words that stand for a noun. Many of them make a reader search for the noun."""


class Figures(NamedTuple):
    """Figures of a text: words, mean words of a sentence, and vague words of 100."""

    words: int
    a_sentence: float
    vague: float


def prose(markdown: str) -> str:
    """Return the sentences of a page, without code, tables, headings, pictures and the addresses of links."""
    text = re.sub(r"(?ms)^[ \t]*(```|~~~).*?^[ \t]*\1", "", markdown)
    text = re.sub(r"(?m)^\s*(\||#|!\[|<|:::|!!!|===|---).*$", "", text)
    text = re.sub(r"(?m)^\s*([-*]|\d+\.)\s+", "\n\n", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_>]", "", re.sub(r"``?[^`]*``?", "name", text))


def sentences(text: str) -> list[str]:
    """Split prose into sentences of three words and more."""
    parts = [
        part for block in re.split(r"\n\s*\n", text) for part in re.split(r"(?<=[.!?:;])\s+", block.strip())
    ]
    return [part for part in parts if len(part.split()) > 2]


def figures(text: str) -> Figures:
    """Measure prose."""
    parts = sentences(text)
    words = len(re.findall(r"[A-Za-z][A-Za-z'-]*", " ".join(parts)))
    return Figures(words, words / max(len(parts), 1), 100 * len(VAGUE.findall(text)) / max(words, 1))


def pages() -> list[Path]:
    """Return the written pages: README, CHANGELOG and docs without what is generated."""
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if not page.relative_to(ROOT).as_posix().startswith(GENERATED)]


def words_of(page: Path) -> int:
    """Count the words of a page outside of code blocks; tables count."""
    text = re.sub(r"(?ms)^[ \t]*```.*?^[ \t]*```", "", page.read_text(encoding="utf-8"))
    return sum(bool(re.search(r"\w", token)) for token in text.split())  # the lines of tables are no words


def page_problems(page: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) of one page."""
    text = page.read_text(encoding="utf-8")
    blanked = re.sub(
        r"(?ms)^[ \t]*```.*?^[ \t]*```|`[^`\n]*`", lambda found: re.sub(r"[^\n]", " ", found[0]), text
    )
    for found in WORDS.finditer(blanked):
        yield text.count("\n", 0, found.start()) + 1, f"{found[0]!r}: say it in plain English"
    for sentence in sentences(prose(text)):
        if len(sentence.split()) > MOST_A_SENTENCE:
            begin = " ".join(sentence.split()[:6])
            yield 1, f"a sentence of {len(sentence.split())} words, {begin!r}...: split it"
    found_figures = figures(prose(text))
    if found_figures.words >= 100 and found_figures.vague > MOST_VAGUE:
        yield (
            1,
            f"{found_figures.vague:.1f} vague words of 100, at most {MOST_VAGUE}: name the things instead",
        )


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


def word_problems(source: str, *, has_data: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for `WORDS` in comments and strings; with ``has_data``, only in strings that are
    statements: docstrings of modules, functions, classes, and constants."""
    is_begin = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING and (is_begin or not has_data)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            is_begin = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if is_text or token.type == tokenize.COMMENT:
            for found in WORDS.finditer(token.string):
                line = token.start[0] + token.string.count("\n", 0, found.start())
                yield line, f"{found[0]!r}: say it in the words of the field's documentation"


def modules(folder: str) -> list[Path]:
    """Return the modules of a folder that are not reached by a link."""
    found = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in found if not any(parent.is_symlink() for parent in path.parents)]


def docstrings(path: Path) -> str:
    """Return all docstrings of a module, as paragraphs."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)
    ]
    return "\n\n".join(filter(None, (ast.get_docstring(node) for node in nodes)))


def packages(folders: Sequence[str] = (*PRODUCT, *AROUND)) -> dict[str, str]:
    """Return the prose of the docstrings of each package of two levels."""
    found: dict[str, list[str]] = {}
    for path in [path for folder in folders for path in modules(folder)]:
        parts = path.relative_to(ROOT).parts
        found.setdefault("/".join(parts[: min(2, len(parts) - 1)]), []).append(docstrings(path))
    return {name: prose("\n\n".join(texts)) for name, texts in found.items()}


def problems() -> list[str]:
    """Return every problem with its place."""
    found = []
    for path in [path for folder in (*PRODUCT, *AROUND) for path in modules(folder)]:
        source = path.read_text(encoding="utf-8")
        words = word_problems(source, has_data=path.relative_to(ROOT).parts[0] in AROUND)
        each = sorted([*docstring_problems(ast.parse(source)), *words])
        found += [f"{path.relative_to(ROOT)}:{line}: {problem}" for line, problem in each]
    for name, text in packages().items():
        if (vague := figures(text).vague) > MOST_VAGUE_OF_DOCSTRINGS:
            found.append(
                f"{name}: {vague:.1f} vague words of 100 in docstrings, at most {MOST_VAGUE_OF_DOCSTRINGS}"
            )
    for page in pages():
        found += [f"{page.relative_to(ROOT)}:{line}: {problem}" for line, problem in page_problems(page)]
    if (count := sum(words_of(page) for page in pages())) > MOST_WORDS:
        found.append(f"docs: {count} words, at most {MOST_WORDS}: say less, or only once")
    return found


def measure() -> None:
    """Print the figures of each page and package, of all pages, and of product and other docstrings."""
    read = {str(page.relative_to(ROOT)): prose(page.read_text(encoding="utf-8")) for page in pages()}
    rows = {**read, "all pages": "\n\n".join(read.values()), **packages()}
    rows["docstrings of the product"] = "\n\n".join(packages(PRODUCT).values())
    rows["other docstrings"] = "\n\n".join(packages(AROUND).values())
    for name, text in rows.items():
        found = figures(text)
        print(f"{name:44} {found.words:7} words {found.a_sentence:5.1f} a sentence {found.vague:5.1f} vague")
    print(f"{sum(words_of(page) for page in pages())} words in pages, tables included")


def main() -> int:
    """Print problems or figures, and return 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--measure", action="store_true", help="print figures instead of problems")
    parser.add_argument("--only", default="", help="problems of paths that begin with this")
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
        return 0
    found = [problem for problem in problems() if problem.startswith(arguments.only)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
