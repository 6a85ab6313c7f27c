"""The presets' recipes of stage 2 side by side: `python -m dev.recipes`."""
