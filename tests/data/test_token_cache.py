"""The cache of tokens: the columns are those without it, computed once, and never those of a damaged file."""

import errno
import os
import signal
import time

import pytest
from datasets import Dataset
from soren_align.core.errors import ResumableError, UserError
from soren_align.data import cache, dataset_stats, load_split, tokenize, tokens
from soren_align.data.encode import encode
from soren_align.data.masks import from_token_columns, token_columns
from tests.support.conversations import CHATML, chat_row, pair_row, split

ROWS = {"sft": [chat_row(i, turns=1 + i % 3) for i in range(70)], "dpo": [pair_row(i) for i in range(70)]}


@pytest.fixture
def dataset(write):
    return lambda task="sft", rows=None: load_split(split(write(f"{task}.jsonl", rows or ROWS[task])), task).dataset


@pytest.fixture
def count(monkeypatch):
    """The batches that were tokenized."""
    batches = []
    monkeypatch.setattr(tokens, "encode", lambda *given: batches.append(given) or encode(*given))
    return batches


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_tokens_and_the_account_are_those_of_the_examples(make_tokenizer, dataset, tmp_path, task):
    rows, tokenizer = dataset(task), make_tokenizer()
    tokens = tokenize(rows, task, tokenizer, tmp_path, assistant_only_loss=True)
    expected = list(encode(rows[:], task, tokenizer, True))
    read = from_token_columns(tokens[:], task)
    assert [(e.sides, e.num_prompt) for e in read] == [(e.sides, e.num_prompt) for e in expected]
    assert token_columns(expected, task) == tokens[:]
    for max_length in (None, 60):
        counted = dataset_stats(tokens, task, tokenizer, max_length=max_length)
        assert counted == dataset_stats(rows, task, tokenizer, max_length=max_length, assistant_only_loss=True)


def test_equal_examples_and_settings_are_tokenized_once(make_tokenizer, dataset, tmp_path, count):
    done = []
    first = tokenize(dataset(), "sft", make_tokenizer(), tmp_path, on_examples=lambda *numbers: done.append(numbers))
    num_tokens = sum(map(len, first["input_ids"]))
    assert (len(count), done) == (2, [(70, num_tokens), (0, 0)])
    again = tokenize(dataset(), "sft", make_tokenizer(), tmp_path, on_examples=lambda *numbers: done.append(numbers))
    assert (len(count), done[2:]) == (2, [(70, 0)])
    assert again[:] == first[:]
    assert again._fingerprint == first._fingerprint  # of which TRL's caches depend


OTHERS = {
    "examples": lambda rows, tokenizer: (rows.select(range(69)), "sft", tokenizer, {}),
    "order": lambda rows, tokenizer: (rows.select(range(69, -1, -1)), "sft", tokenizer, {}),
    "trained tokens": lambda rows, tokenizer: (rows, "sft", tokenizer, {"assistant_only_loss": True}),
}


@pytest.mark.parametrize("other", [*OTHERS, "template", "stop token"])
def test_anything_that_changes_tokens_is_tokenized_again(make_tokenizer, dataset, tmp_path, count, other):
    rows = dataset()
    tokenize(rows, "sft", make_tokenizer(), tmp_path)
    tokenizers = {"template": make_tokenizer(CHATML + " "), "stop token": make_tokenizer(eos="<|endoftext|>")}
    prepare = OTHERS.get(other, lambda rows, tokenizer: (rows, "sft", tokenizer, {}))
    changed, task, tokenizer, settings = prepare(rows, tokenizers.get(other, make_tokenizer()))
    tokens = tokenize(changed, task, tokenizer, tmp_path, **settings)
    assert len(count) == 4
    expected = encode(changed[:], task, tokenizer, **{"assistant_only_loss": False, **settings})
    assert tokens[:] == token_columns(expected, task)


def damaged(file, how):
    content = bytearray(file.read_bytes())
    if how == "a flipped bit":
        content[len(content) // 2] ^= 1
    elif how == "zeros":
        start = len(content) // 3
        content[start : start + 512] = bytes(len(content[start : start + 512]))
    file.write_bytes(content[: {"truncated": len(content) // 2, "emptied": 0}.get(how, len(content))])


@pytest.mark.parametrize("how", ["a flipped bit", "zeros", "truncated", "emptied"])
@pytest.mark.parametrize("name", ["data.arrow", "digests.json"])
def test_a_damaged_entry_is_removed_and_made_again_with_a_notice(
    make_tokenizer, dataset, tmp_path, count, capsys, name, how
):
    first = tokenize(dataset(), "sft", make_tokenizer(), tmp_path)[:]
    (file,) = tmp_path.glob(f"tokens/*/{name}")
    damaged(file, how)
    assert tokenize(dataset(), "sft", make_tokenizer(), tmp_path)[:] == first
    assert len(count) == 4
    notice = capsys.readouterr().err
    assert notice.count("notice") == 1
    assert "the content differs from what was saved" in " ".join(notice.split())
    assert " ".join(notice.split()).endswith("this cache entry is removed and made again")
    assert tokenize(dataset(), "sft", make_tokenizer(), tmp_path)[:] == first  # which is intact
    assert (len(count), capsys.readouterr().err) == (4, "")
    assert len(list(tmp_path.glob("tokens/*"))) == 1  # no part of a folder is left


def test_a_damaged_file_of_examples_is_made_again_too(write, cache, capsys):
    path = split(write("sft.jsonl", ROWS["sft"]))
    first = load_split(path, "sft").dataset[:]
    (file,) = cache.glob("soren-align/*/data.arrow")
    damaged(file, "a flipped bit")
    assert load_split(path, "sft").dataset[:] == first
    assert "is removed and made again" in " ".join(capsys.readouterr().err.split())


def test_without_a_cache_the_folder_ends_with_the_tokens(make_tokenizer, dataset, tmp_path, monkeypatch, count):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for _ in range(2):
        tokens = tokenize(dataset(), "sft", make_tokenizer(), None)
        assert len(tokens) == 70
        assert len(list(tmp_path.glob("soren-align-*"))) == 1
        del tokens
    assert list(tmp_path.glob("soren-align-*")) == []
    assert len(count) == 4


def test_folders_unused_for_long_or_beyond_the_size_are_removed(tmp_path, monkeypatch):
    days = {"new": 0, "in use": 1, "older": 10, "oldest": 20, "unused": 40}
    for name, age in days.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.arrow").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (time.time() - age * 86400,) * 2)
    for size, num_kept in ((cache.MAX_BYTES, 4), (350, 3), (0, 2)):
        monkeypatch.setattr(cache, "MAX_BYTES", size)
        cache.prune(tmp_path)
        assert {f.name for f in tmp_path.iterdir()} == {*list(days)[:num_kept]}


def test_a_folder_that_cannot_be_written_is_refused_with_its_remedy(make_tokenizer, dataset, tmp_path):
    (tmp_path / "tokens").write_text("a file")
    message = r"tokens cannot be cached in this folder: .*SOREN_ALIGN_CACHE.* write `cache: false` under"
    with pytest.raises(UserError, match=message):
        tokenize(dataset(), "sft", make_tokenizer(), tmp_path)


def test_tokens_of_text_need_no_template(make_tokenizer, tmp_path):
    rows = Dataset.from_list([{"text": "A lynx."}, {"text": "ü🦓"}])
    tokens = tokenize(rows, "sft", make_tokenizer(None), tmp_path)
    assert [make_tokenizer().decode(ids) for ids in tokens["input_ids"]] == ["A lynx.<|im_end|>", "ü🦓<|im_end|>"]


def test_tokens_that_another_process_has_just_written_are_taken(tmp_path):
    """Two runs of a study start together: the second's rename finds the first's folder, which is not empty."""
    folder = tmp_path / "tokens" / "key"
    with cache.written_whole(folder) as part:
        (part / "tokens.arrow").write_text("ours")
        folder.mkdir(parents=True)
        (folder / "of the other").write_text("tokens")
    assert (folder / "of the other").read_text() == "tokens"
    assert list(folder.parent.iterdir()) == [folder]


@pytest.fixture
def in_chunks(make_tokenizer, dataset, tmp_path, monkeypatch):
    """in_chunks(number, rows, template) returns the tokens' file, of a cache of its own, made in chunks of 5."""
    monkeypatch.setattr(tokens, "CHUNK_SIZE", 5)

    def make(number, rows=None, template=None):
        folder = tmp_path / str(number)
        tokenize(dataset(rows=rows), "sft", make_tokenizer(template) if template else make_tokenizer(), folder,
                 assistant_only_loss=True, num_processes=number)  # fmt: skip
        (entry,) = (folder / "tokens").iterdir()
        return (entry / "data.arrow").read_bytes()

    return make


@pytest.mark.process
def test_any_number_of_processes_writes_the_same_bytes(in_chunks):
    assert in_chunks(1) == in_chunks(2) == in_chunks(3)


@pytest.mark.process
@pytest.mark.parametrize("number", [1, 2])
def test_an_example_that_fails_is_named_and_nothing_is_left(in_chunks, tmp_path, number):
    picky = CHATML + "{% if 'Question 42?' in messages[0]['content'] %}{{ raise_exception('not this one') }}{% endif %}"
    rows = [chat_row(i) for i in range(70)]
    rows[42]["messages"][0]["content"] = "Question 42?"
    with pytest.raises(UserError, match=r"^example 43, .*Question 42.*fails on a later one: not this one"):
        in_chunks(number, rows, picky)
    assert not [*(tmp_path / f"{number}/tokens").iterdir()]


@pytest.mark.process
def test_after_a_killed_process_or_on_a_full_disk_nothing_is_left(in_chunks, tmp_path, monkeypatch):
    def killed(*given):
        os.kill(os.getpid(), signal.SIGKILL)

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tokens, "encode", killed)
        with pytest.raises(ResumableError, match="a process that prepares the examples was killed"):
            in_chunks(2)
    assert not [*(tmp_path / "2/tokens").iterdir()]
    with monkeypatch.context() as patched:
        patched.setattr(cache.ArrowWriter, "write_table", full)
        with pytest.raises(UserError, match="tokens cannot be cached in this folder: No space left on device"):
            in_chunks(2)
    assert not [*(tmp_path / "2/tokens").iterdir()]
    assert in_chunks(2)
