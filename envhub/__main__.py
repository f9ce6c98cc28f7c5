"""``python -m envhub`` is the ``envhub`` command."""

from envhub.cli import main

main()
