"""What type checkers see of ``envhub`` is what there is."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

from conformance import option_keywords, references
from envhub_client.make import make_vec
from envhub_client.option_keywords import MakeKeywords
from envhub_client.session.options import FaultOptions, HostingOptions

import envhub

STUB = Path(envhub.__file__).with_suffix(".pyi")
KEYWORDS = Path(__file__).parents[2] / "client/envhub_client/option_keywords.py"


def test_stub_has_every_name_from_where_it_is() -> None:
    homes = {}
    for line in ast.parse(STUB.read_text()).body:
        if isinstance(line, ast.ImportFrom):
            homes.update({name.name: (line.module, name.asname) for name in line.names})
    modules = {name: ("envhub", name) for name in envhub._MODULES}
    assert homes == {**{name: (home, name) for name, home in envhub._HOMES.items()}, **modules}
    assert all(hasattr(import_module(home), name) for name, (home, _) in homes.items() if name not in modules)


def test_typed_keywords_are_those_of_the_functions() -> None:
    assert KEYWORDS.read_text() == option_keywords.written()


def test_make_vec_describes_each_keyword_for_editors_which_read_no_other_docstring() -> None:
    of_make_vec = option_keywords.described(make_vec)
    assert {*get_type_hints(MakeKeywords)} - {*option_keywords.OF_ENVS} <= {*of_make_vec}
    for options in (FaultOptions, HostingOptions):
        for name, text in option_keywords.described(options).items():
            begin, *_ = re.split(r"[,.:;](?: |$)", of_make_vec[name])
            assert text.startswith(begin)


def test_references_in_the_pages_are_the_codes() -> None:
    for page in references.PAGES:
        assert page.read_text() == references.updated(page.read_text()), "cd tests && python -m conformance.references"
        assert references.REFERENCE.search(page.read_text())
