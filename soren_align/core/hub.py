"""Whether the Hugging Face hub answers: asked once and briefly, since its own client retries for half a minute."""

TIMEOUT_SECONDS = 3.0


def hub_answers() -> bool:
    """Whether the hub can be used now: offline mode is off, and the hub answers, not only a proxy before it."""
    from huggingface_hub import constants, get_session  # 0.2 s, of commands that mostly need no hub

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        return get_session().head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS).status_code < 500
    except Exception:  # whatever its client raises, the hub is unreachable
        return False
