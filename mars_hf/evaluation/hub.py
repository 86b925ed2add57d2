"""Whether the Hugging Face Hub can be used, decided once and quickly."""

import functools
import os
import threading

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
PATIENCE = 3.0  # seconds


def hub_reachable() -> bool:
    """Whether the Hub answers, without the half minute of retries its clients spend on finding out.

    The first call of a process sends one request and waits at most three seconds; later calls repeat its answer. An
    offline variable (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE, TRANSFORMERS_OFFLINE) is obeyed at every call, and then no
    request is sent.

    Returns:
        False if an offline variable is set or the Hub did not answer.
    """
    if any(os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"} for name in OFFLINE_VARIABLES):
        return False
    return _hub_answers()


@functools.cache
def _hub_answers() -> bool:
    from huggingface_hub import constants, get_session

    answers: list[bool] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=PATIENCE).status_code < 400)
        except Exception:  # whatever went wrong (no route, no name, no certificate), the Hub is out of reach
            answers.append(False)

    # The timeout of a request does not cover the look-up of the host name, the wait for the thread does.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(answers) and answers[0]
