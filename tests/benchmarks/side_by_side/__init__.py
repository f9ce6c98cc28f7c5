"""Other packages' ways to step many envs, and raw pyzmq, next to those of ``envhub bench``, with their CPUs and memory.

cd tests/benchmarks && python -m side_by_side --help
"""
