"""A plan asks the hub once whether it answers, and then does without it."""

from types import SimpleNamespace

import datasets.config
import pytest

from soren_align.planning import offline


@pytest.fixture
def hub(monkeypatch):
    """hub(head) replaces the request by `head`, in online mode."""

    def replace(head, is_offline=False):
        monkeypatch.setattr(offline.constants, "HF_HUB_OFFLINE", is_offline)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", is_offline)
        monkeypatch.setattr(offline, "get_session", lambda: SimpleNamespace(head=head))

    return replace


def test_a_hub_that_does_not_answer_sets_offline_mode(hub):
    def head(url, timeout):
        assert timeout <= 5, "the hub's own client would retry for half a minute"
        raise OSError("no route to host")

    hub(head)
    with offline.offline_without_hub():
        assert offline.constants.HF_HUB_OFFLINE is True
        assert datasets.config.HF_HUB_OFFLINE is True
    assert offline.constants.HF_HUB_OFFLINE is False


def test_a_hub_that_answers_is_used(hub):
    hub(lambda url, timeout: None)
    with offline.offline_without_hub():
        assert offline.constants.HF_HUB_OFFLINE is False


def test_in_offline_mode_nothing_is_requested(hub):
    hub(lambda url, timeout: pytest.fail("a request"), is_offline=True)
    with offline.offline_without_hub():
        assert offline.constants.HF_HUB_OFFLINE is True
