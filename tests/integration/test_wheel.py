"""The wheel has the pages that the code names, and metadata for an index page."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("envhub", "server/envhub_server", "client/envhub_client")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    subprocess.run(build, check=True, timeout=300)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


@pytest.mark.long
def test_pages_that_the_code_names_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    texts = {path: path.read_text() for folder in CODE for path in (ROOT / folder).rglob("*.py")}
    named = {page for text in texts.values() for page in re.findall(r"[\w/.-]*\w\.md\b", text)}
    pages = {page for page in named if not page.startswith("tests/")}  # those are for developers
    assert pages and not [page for page in pages if not any(f"/{name}".endswith(f"/{page}") for name in names)]
    assert not [name for name in names if "__main__" in name and not name.startswith("envhub/")]


@pytest.mark.long
def test_readme_of_an_index_page_leads_nowhere_wrong(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Project-URL"] and metadata.get_all("Classifier")
    readme = str(metadata.get_payload())
    assert "envhub.make_vec(" in readme
    assert not [target for target in re.findall(r"\]\(([^)]+)\)", readme) if not target.startswith("https://")]
