"""The ``envhub`` command's tools, which the library never imports."""
