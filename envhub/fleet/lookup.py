"""Program that prints what clients connect to a fleet with, for one that is not connected to Ray: keys, too.

That program reads it from a pipe. It calls ``ray.init`` here, so that its own call of it, if there is to be one, can
still say how.
"""

from __future__ import annotations

import json
import sys

from envhub.errors import EnvHubError
from envhub.fleet.fleet import Fleet, connect


def main() -> None:
    """Print a JSON object: by the number of each hub that serves, its tcp and its ipc address."""
    try:
        connect()
        access = Fleet(sys.argv[1]).access()
    except EnvHubError as error:
        sys.exit(f"{error}")
    print(json.dumps(access))


if __name__ == "__main__":
    main()
