"""Benchmarks: each prints ratios of things measured alternately in one process, and their spread."""
