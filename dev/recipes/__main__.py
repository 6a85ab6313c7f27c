"""Compares the recipes of the presets."""

import sys

from command_line import run
from dev.recipes.presets import main, parse

if __name__ == "__main__":
    sys.exit(run(main, parse()))
