"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("client", "docker", "envhub", "server", "tests")
TOP = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / ".github/CONTRIBUTING.md", ROOT / ".github/SECURITY.md"]
PAGES = [*TOP, *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]

# Their programs run in ``tests/integration/test_readme.py``, unless a mark says where else.
MANUAL = [page for page in PAGES if page.relative_to(ROOT).parts[0] not in ("docker", "tests")]


def blocks(mark: str, pages: Iterable[Path] = PAGES) -> list[str]:
    """Return the blocks of code of these pages whose fence has this mark, such as ``python torch``."""
    fences = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [block for page in pages for of, block in fences.findall(page.read_text()) if of == mark]


def section(page: Path, title: str) -> str:
    """Return the text under a heading of a page, up to the next heading of the first or second level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page}: no section {title!r}"
    return found[2]
