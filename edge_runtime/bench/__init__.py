"""Benchmarks of the product on the machine it stands on. Each compares within one run; ratios are what counts."""
