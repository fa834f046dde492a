"""Ratios measured in one run against a named reference; never timed tests. `python -m benchmarks` prints them all."""
