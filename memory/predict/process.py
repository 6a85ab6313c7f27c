"""The process that predicts: reads one JSON question a line, writes one JSON answer a line, until its input ends."""

import gc
import json
import logging
import os
import sys

# No GPU is used, and one question must not take the cores of another.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Answer questions from standard input; networks may print, so answers go to the original standard output."""
    answers, sys.stdout = sys.stdout, sys.stderr
    logging.disable(logging.WARNING)
    # Collecting garbage while a million objects are imported and followed takes a tenth of the time; after each answer
    # it costs nobody anything, and what is alive at a peak does not depend on when it ran.
    gc.disable()

    from memory.predict.step import predict_step
    from settings import Settings, UserError

    for line in sys.stdin:
        question = json.loads(line)
        try:
            settings = Settings.model_validate(question["settings"])
            answer = predict_step(settings, question["stage"]).to_json()
        except (UserError, RuntimeError, ValueError, AssertionError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
