from __future__ import annotations

from tools.client import CLIENT, generated


def test_generated_modules_are_up_to_date() -> None:
    """Models and operations are those of the OpenAPI document, and both clients have the same methods."""
    texts = generated()
    assert [path for path, text in texts.items() if path.read_text() != text] == [], "make client"
    folders = [CLIENT / "generated", CLIENT / "synchronous"]
    found = {path for folder in folders for path in folder.glob("*.py")}
    assert found == texts.keys() | {folder / "__init__.py" for folder in folders}
