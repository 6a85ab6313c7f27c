"""What all commands share: arguments, checks of output paths, exit codes, logging and errors. Imports no torch."""

from runtime.cli.arguments import (
    above_zero,
    add_config,
    add_run_options,
    add_training,
    at_least,
    check_output_file,
    check_output_folder,
    overrides_of,
    parser,
    write_output,
)
from runtime.cli.execution import INTERRUPTED, OUT_OF_MEMORY, STEP_LINES, run
