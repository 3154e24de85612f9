"""Circuits: replacement model → attribution → graph → pruning, paths and certificate."""
