"""Parts of a training framework that factories use, sent in place of its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import cloudpickle


@contextmanager
def by_value(factories: Any, *packages: str) -> Iterator[None]:
    """Have cloudpickle send what factories use of these packages; by reference, each worker would import PyTorch.

    Where that is not possible, as for a factory that names a whole module, it is by reference all the same.
    """
    with ExitStack() as stack:
        for name in packages:
            package = sys.modules.get(name)
            if package is not None and name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(package)
                stack.callback(cloudpickle.unregister_pickle_by_value, package)
        try:
            cloudpickle.dumps(factories)
        except Exception:
            stack.close()
        yield
