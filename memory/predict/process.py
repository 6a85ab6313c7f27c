"""The program of a prediction worker: read one JSON request per line, write one JSON answer per line, until EOF.

A request names a config to predict, or asks how long the parts of the last one take on this machine's CPU. The only
argument is the memory of a GPU that cannot run Triton, or 0.
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
    from models.lean.norm.torch_kernels import emulate_gpu
    from settings import Settings, UserError

    if memory := int(sys.argv[1]):
        emulate_gpu(memory)
    calls: dict[str, Any] = {}  # of the last prediction
    answer: dict[str, Any]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "times" in request:
                answer = _measured_seconds(calls, request)
            else:
                calls = {}
                settings = Settings.model_validate(request["settings"])
                answer = predict_step(settings, request["stage"], calls=calls).to_json()
        except (UserError, RuntimeError, ValueError, AssertionError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        gc.collect()


def _measured_seconds(calls: dict[str, Any], request: dict[str, Any]) -> dict[str, float]:
    import torch

    from memory.kernels.cpu_calls import call_overhead, seconds_of_parts

    torch.set_num_threads(request["threads"])
    try:
        return seconds_of_parts(calls, request["times"], request["allowed_seconds"], overhead=call_overhead())
    finally:
        torch.set_num_threads(1)


if __name__ == "__main__":
    main()
