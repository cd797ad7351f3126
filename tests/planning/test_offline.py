"""A plan asks the hub once whether it answers, and then does without it."""

import os
from types import SimpleNamespace

import pytest

from soren_align.planning import offline


@pytest.fixture
def hub(monkeypatch):
    """hub(head) replaces the request by `head`, in online mode."""

    def replace(head, is_offline=False):
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(offline.constants, "HF_HUB_OFFLINE", is_offline)
        monkeypatch.setattr(offline, "get_session", lambda: SimpleNamespace(head=head))

    return replace


def test_a_hub_that_does_not_answer_sets_offline_mode(hub):
    def head(url, timeout):
        assert timeout <= 5, "the hub's own client would retry for half a minute"
        raise OSError("no route to host")

    hub(head)
    offline.go_offline_without_hub()
    assert offline.constants.HF_HUB_OFFLINE is True
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_hub_that_answers_is_used(hub):
    hub(lambda url, timeout: None)
    offline.go_offline_without_hub()
    assert offline.constants.HF_HUB_OFFLINE is False
    assert "HF_HUB_OFFLINE" not in os.environ


def test_in_offline_mode_nothing_is_requested(hub):
    hub(lambda url, timeout: pytest.fail("a request"), is_offline=True)
    offline.go_offline_without_hub()
