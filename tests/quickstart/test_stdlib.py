"""quickstart/stdlib on a small library: its evaluation predicts the tokens that the n-gram baselines score."""

import sysconfig

import pytest
from research.studies import ngrams
from tests.support.tiny_run import TinyRun


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of 60 modules of different lengths."""
    (tmp_path / "lib" / "pack").mkdir(parents=True)
    for i in range(60):
        lines = [f"def function_{j}(x):\n    return x + {i * j}\n" for j in range(1 + i % 7)]
        (tmp_path / "lib" / "pack" / f"module{i}.py").write_text("\n".join(lines))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))


@pytest.mark.model
def test_evaluation_and_baselines_have_the_same_tokens(library, tmp_path):
    short = ("model.tokenizer={vocab_size: 280}", "trainer.max_length=32", "run.global_batch_size=8")
    run = TinyRun(tmp_path / "run", "stdlib", *short, "trainer.max_steps=2", "trainer.warmup_steps=1")
    setup = run.prepare()
    lengths = [len(ids) for ids in setup.tokens.eval["input_ids"]]
    positions = ngrams.predicted(lengths, 32, is_wrapped=True)
    assert max(lengths) > 32 > min(lengths)
    assert run.train()
    evaluation = run.folder.read()["training"]["validation"]
    assert evaluation["num_tokens"] == len(positions)
    train, test = ngrams.flat(setup.tokens.train), ngrams.flat(setup.tokens.eval)
    baselines = ngrams.perplexities(train, test, positions, 280)
    assert evaluation["perplexity"] > baselines["unigram"] > baselines["trigram"] > 1  # two steps learn nothing
