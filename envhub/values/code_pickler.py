"""Pickles of functions and classes by value, whose tracebacks name the files that they were written in."""

from __future__ import annotations

import io
import types
from collections import ChainMap
from typing import Any

import cloudpickle

_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def dumps(value: Any) -> bytes:
    """``value`` as ``cloudpickle.dumps`` gives it, with the file name of each code object.

    Raises:
        Exception: what a foreign object raises when it is pickled.
    """
    buffer = io.BytesIO()
    _CodePickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_code_in_its_file(code: types.CodeType) -> tuple[Any, ...]:
    rebuild, arguments = _reduce_code(code)
    return rebuild, tuple(code.co_filename if part == "<dynamic-code>" else part for part in arguments)


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    # cloudpickle 3.1.3 calls every file "<dynamic-code>", so that tracebacks show no line and breakpoints do not hold.
    dispatch_table = ChainMap({types.CodeType: _reduce_code_in_its_file}, cloudpickle.Pickler.dispatch_table)
