"""Other packages' ways to step many envs, and raw pyzmq, next to those of ``envhub bench``."""
