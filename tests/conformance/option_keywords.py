"""Writes the module of typed keywords, from the annotations of what takes these keywords.

``python tests/conformance/option_keywords.py`` writes ``client/envhub_client/option_keywords.py``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envhub_client.make import make_vec
from envhub_client.option_keywords import OptionKeywords
from envhub_client.session.options import FaultOptions, HostingOptions

HEAD = '''"""The keywords of ``envhub.make_vec`` as types, which type checkers and editors know by name.

Written by ``tests/conformance/option_keywords.py``, from the annotations of ``FaultOptions``, ``HostingOptions`` and
``make_vec``, whose docstrings describe them. Type checkers know no other arguments of envs: these go into
``env_kwargs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gymnasium.vector import AutoresetMode
from typing_extensions import TypedDict

from envhub_client.keywords import WrapperLike
from envhub_client.record_options import RecordOptions
from envhub_client.session.options import (
    Compression,
    CrashPolicy,
    HubLossPolicy,
    InfoMode,
    InvalidPolicy,
    LaneName,
    ModeName,
    ObservationMode,
    Policy,
    Rendering,
)
'''
# Which of ``make_vec``'s own keywords each function takes besides those of a session.
OF_A_SESSION = (
    *("num_workers", "observation_mode", "copy", "lane", "spin_us", "pin", "vector", "compression"),
    *("reconnect_timeout", "hub_index", "on_hub_loss", "record", "wrappers"),
)
OF_CLIENTS = ("autoreset_mode", "info_mode", "env_kwargs")
OF_ENVS = {"render_mode": "str | None", "max_episode_steps": "int | None", "disable_env_checker": "bool | None"}
OF_FRAMEWORKS = ("hub", "split", "env_kwargs")
ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \w+)*): ", re.MULTILINE)


def described(documented: Any) -> dict[str, str]:
    """The text of each attribute or argument in a docstring."""
    doc = inspect.getdoc(documented) or ""
    section = re.search(r"^(?:Attributes|Args):\n(.*?)(?:^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    assert section is not None, documented
    _, *found = ENTRY.split(section[1])
    return {
        name: " ".join(text.split())
        for names, text in zip(found[::2], found[1::2], strict=True)
        for name in names.split(", ")
    }


def kind(name: str, doc: str, base: str, keywords: Mapping[str, object]) -> Iterator[str]:
    """The lines of one of the types."""
    yield f'\n\nclass {name}({base}, total=False):\n    """{doc}"""\n\n'
    for keyword, annotation in keywords.items():
        yield f"    {keyword}: {annotation}\n".replace("'", '"')  # as the formatter writes it


def written() -> str:
    """The module."""
    own = {name: each.annotation for name, each in inspect.signature(make_vec).parameters.items()}

    def of_make_vec(names: tuple[str, ...]) -> dict[str, object]:
        return {name: own[name] for name in names}

    both = dataclasses.fields(FaultOptions) + dataclasses.fields(HostingOptions)
    options: dict[str, object] = {field.name: field.type for field in both}

    pieces = [
        HEAD,
        *kind("OptionKeywords", "The fields of ``FaultOptions`` and ``HostingOptions``.", "TypedDict", options),
        *kind("EnvKeywords", "Besides, what ``gymnasium.make`` takes for every env.", "OptionKeywords", OF_ENVS),
        *kind(
            "SessionKeywords", "Keywords of every function that makes envs.", "EnvKeywords", of_make_vec(OF_A_SESSION)
        ),
        *kind("ClientKeywords", "Keywords of ``Client.make_vec``.", "SessionKeywords", of_make_vec(OF_CLIENTS)),
        *kind("MakeKeywords", "Keywords of the frameworks' functions.", "SessionKeywords", of_make_vec(OF_FRAMEWORKS)),
    ]
    return "".join(pieces)


if __name__ == "__main__":
    Path(sys.modules[OptionKeywords.__module__].__file__ or "").write_text(written())
