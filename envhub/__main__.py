"""``python -m envhub`` is the ``envhub`` command."""

import sys

# Python has put the working directory first, for ``-m``: a msgpack.py there is not to be the hub's.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from envhub.cli import main

main()
