from __future__ import annotations

from tools.client import CLIENT, generated


def test_generated_modules_are_up_to_date() -> None:
    """Generated models, requests and methods match the OpenAPI document; both clients have all methods."""
    texts = generated()
    assert [path for path, text in texts.items() if path.read_text() != text] == [], "make client"
    marked = {path for path in CLIENT.rglob("*.py") if path.read_text().startswith("# Generated ")}
    assert marked == texts.keys()
