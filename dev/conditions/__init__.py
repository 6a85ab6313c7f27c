"""Measures what conditions and `occupied_weight` are worth, for docs/condition_measurements.md."""
