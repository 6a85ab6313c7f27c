"""Measures what 8-bit optimizer states and quantised latents cost, for docs/quantised.md."""
