"""Measured speed: `python -m benchmarks` prints one table of this package against its peers and this machine's limits.

Nothing imports this package. See docs/performance.md for how to read the table.
"""
