"""The program of a prediction worker: read one JSON request per line, write one JSON answer per line, until EOF.

The only argument is the memory of a GPU that cannot run Triton, or 0.
"""

import gc
import json
import logging
import os
import sys
from typing import Any

# Predictions need no GPU, and workers must not compete for cores.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Answer requests from standard input on the original standard output; anything networks print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    logging.disable(logging.WARNING)
    # Garbage collection during imports and tracking, with a million live objects, takes a tenth of the time. Collect
    # after each answer instead, when nobody waits. The predicted peak does not depend on when it runs.
    gc.disable()

    from memory.predict.step import predict_step
    from settings import Settings, UserError

    without_triton = int(sys.argv[1])
    answer: dict[str, Any]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            settings = Settings.model_validate(request["settings"])
            answer = predict_step(settings, request["stage"], without_triton=without_triton).to_json()
        except (UserError, RuntimeError, ValueError, AssertionError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
