"""What "bit for bit the same" means."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(found: Any, wanted: Any, where: str) -> None:
    """The same classes, dtypes, shapes and bits, all the way down."""
    if isinstance(wanted, np.ndarray) and wanted.dtype != object:
        assert type(found) is np.ndarray, where
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, where
        assert found.tobytes() == wanted.tobytes(), f"{where}: {found} != {wanted}"
    elif isinstance(wanted, dict):
        assert isinstance(found, dict) and set(found) == set(wanted), f"{where}: {found} != {wanted}"
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(wanted, (tuple, list, np.ndarray)):
        assert type(found) is type(wanted) and len(found) == len(wanted), f"{where}: {found} != {wanted}"
        for index, value in enumerate(wanted):
            assert_same(found[index], value, f"{where}[{index}]")
    else:
        assert type(found) is type(wanted) and found == wanted, f"{where}: {found!r} != {wanted!r}"
