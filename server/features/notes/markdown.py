"""Markdown to safe HTML: CommonMark with tables and strikethrough, without raw HTML.

An allow-list of tags and attributes cleans the output of the parser, so a mistake in either runs no script.
Images become links, because pages load nothing from other hosts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from dcp.server.catalog.inputs import is_clean
from dcp.server.core.pages.formatting import visible

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

MAX_CHARACTERS: Final = 16_000
MAX_CELLS: Final = 10_000
"""Cells of a table. The parser fills short rows, so a few characters can create a thousand cells."""

_TAGS: Final = (
    *("p", "br", "hr", "h3", "h4", "h5", "h6", "blockquote", "pre", "ul", "ol", "li"),
    *("a", "code", "em", "strong", "s", "div", "table", "thead", "tbody", "tr", "th", "td"),
)
_ATTRIBUTES: Final = {"a": {"href", "title"}, "ol": {"start"}}
_ALIGNED: Final = {"align": {"left", "center", "right"}}
_CHOSEN: Final = {"div": {"class": {"scroll"}}, "td": _ALIGNED, "th": _ALIGNED}
_FOCUSABLE: Final = {
    "div": {"role": "region", "aria-label": "Table", "tabindex": "0"},
    "pre": {"tabindex": "0"},
}
"""Makes scrollable parts reachable with the keyboard."""
_REL: Final = "nofollow noopener noreferrer"


_ADDRESS: Final = re.compile(r"(\bhttps?://[^\s<>\"]{0,1999}[^\s<>\"()\[\].,;:!?'*_])")
_DELIMITERS: Final = re.compile(r"[|:\-\s>]*-[|:\-\s>]*")


def check_markdown(text: str) -> str:
    """Return the text with line feeds as line ends. Raises ValueError for text that cannot be stored or
    rendered."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").rstrip()
    if not text.strip():
        raise ValueError("a note needs some text")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a note has {MAX_CHARACTERS:,} characters at most; this note has {len(text):,}")
    if any(not is_clean(line.replace("\t", " ")) for line in text.split("\n")):
        raise ValueError("control characters are not allowed, except tabs and line feeds")
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        columns = max((line.count("|") + 1 for line in lines if _DELIMITERS.fullmatch(line)), default=0)
        if columns * len(lines) > MAX_CELLS:
            raise ValueError(f"a table has {MAX_CELLS:,} cells at most")
    return text


@lru_cache(maxsize=512)
def html_of(text: str) -> Markup:
    """Render a note. Characters that change the direction of text are written as escapes."""
    import nh3

    found = nh3.clean(
        visible(_parser().render(text)),
        tags=set(_TAGS),
        attributes=_ATTRIBUTES,
        tag_attribute_values=_CHOSEN,
        set_tag_attribute_values=_FOCUSABLE,
        url_schemes={"http", "https", "mailto"},
        link_rel=_REL,
    )
    return Markup(found)


def plain_of(text: str, around: str = "", most: int = 120) -> str:
    """Return one line of plain text around the first match of ``around``, ignoring case."""
    line = " ".join(text.split())
    found = max(0, line.lower().find(" ".join(around.split()).lower()))
    begin = max(0, min(found - most // 3, len(line) - most))
    end = begin + most
    return f"{'… ' if begin else ''}{line[begin:end]}{' …' if end < len(line) else ''}"


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.disable(["html_block", "html_inline"])
    parser.core.ruler.push("dcp", _adapt)
    parser.add_render_rule("image", _image)
    parser.add_render_rule("table_open", _table_open)
    parser.add_render_rule("table_close", _table_close)
    return parser


def _adapt(state: Any) -> None:
    """Lower headings below the page's headings, and align columns by attributes: pages refuse inline
    styles."""
    for token in state.tokens:
        if token.type == "inline" and "://" in token.content:
            token.children = list(_with_links(token.children))
        elif token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
        elif token.type in ("td_open", "th_open") and (style := token.attrs.pop("style", None)):
            token.attrSet("align", str(style).partition(":")[2])


def _with_links(tokens: Sequence[Token]) -> Iterator[Token]:
    """Turn addresses in plain text into links."""
    from markdown_it.token import Token

    depth = 0
    for token in tokens:
        depth += (token.type == "link_open") - (token.type == "link_close")
        if token.type != "text" or depth:
            yield token
            continue
        for place, part in enumerate(_ADDRESS.split(token.content)):
            text = Token("text", "", 0, content=part)
            if place % 2 == 0:
                yield text
            else:
                yield from (Token("link_open", "a", 1, {"href": part}), text, Token("link_close", "a", -1))


def _image(renderer: Any, tokens: Sequence[Token], place: int, options: Any, env: Any) -> str:
    from markdown_it.common.utils import escapeHtml

    token = tokens[place]
    address = escapeHtml(str(token.attrs.get("src", "")))
    label = escapeHtml(token.content or str(token.attrs.get("src", "")))
    return f'<a href="{address}">{label}</a>'


def _table_open(renderer: Any, tokens: Sequence[Token], place: int, options: Any, env: Any) -> str:
    return '<div class="scroll"><table>'


def _table_close(renderer: Any, tokens: Sequence[Token], place: int, options: Any, env: Any) -> str:
    return "</table></div>"
