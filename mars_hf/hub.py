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
    return not _offline() and _hub_answers()


def only_local(name: str) -> bool:
    """Whether a model or tokenizer is to be looked for in its folder or the cache alone: `local_files_only`.

    Args:
        name: of it; a folder or a name on the Hub.
    """
    return os.path.isdir(name) or not hub_reachable()


def _offline() -> bool:
    return any(os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"} for name in OFFLINE_VARIABLES)


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


def require_hub(wanted: str, way_out: str) -> None:
    """Refuses at once what the Hub would be asked for in vain.

    Args:
        wanted: the argument and its value, as the error names it.
        way_out: what to give instead.

    Raises:
        ValueError: the Hub does not answer. With an offline variable set, nothing is raised: the cache may hold it.
    """
    if not _offline() and not _hub_answers():
        raise ValueError(
            f"{wanted} is looked for on the Hugging Face Hub, which does not answer: give {way_out}, set "
            "HF_HUB_OFFLINE=1 if it is in the cache, or HF_ENDPOINT to a mirror"
        )
