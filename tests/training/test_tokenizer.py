"""model.tokenizer: random weights with another tokenizer than the folder's, or one trained on the examples."""

import json
import shutil
from pathlib import Path

import pytest
from soren_align.core.errors import UserError
from soren_align.core.files import default_cache_folder
from soren_align.planning.inputs import load_inputs, on_this_machine
from soren_align.run.weights import load_model
from soren_align.training import model as starting_model
from soren_align.training.setup import set_up_training
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

NO_TEMPLATE = ("trainer.assistant_only_loss=false", "data.eval=null")


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.jsonl"
    lines = [f"The number {i} follows {i - 1} and precedes {i + 1}." for i in range(64)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return (f"data.train.path={file}", *NO_TEMPLATE)


@pytest.fixture
def other(tmp_path):
    """The folder of a tokenizer of few words, whose end token is the last."""
    words = {word: i for i, word in enumerate(["<unk>", "<pad>", "The", "number", "</s>"])}
    words = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def test_a_tokenizer_trained_on_the_examples_sizes_the_model(tiny_run, texts):
    run = tiny_run("sft", *texts, "model.tokenizer={vocab_size: 280}")
    setup = run.prepare()
    assert len(setup.tokenizer) == 280
    assert setup.tokenizer.decode(setup.tokens.train[3]["input_ids"]).startswith("The number 3 follows 2")
    model = load_model(setup.start)
    assert model.get_input_embeddings().weight.shape == (280, 64)
    config = model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 0, 1)


def test_plan_and_a_resumed_run_have_the_run_s_tokens(tiny_run, texts):
    run = tiny_run("sft", *texts, "model.tokenizer={vocab_size: 280}")
    planned = load_inputs(on_this_machine(run.recipe), run.folder, None)
    assert planned.config.vocab_size == 280
    assert not run.folder.start.exists()
    started = run.prepare()
    shutil.rmtree(default_cache_folder() / "tokenizers")
    resumed = set_up_training(run.recipe, run.folder)
    assert not (default_cache_folder() / "tokenizers").exists()  # the start folder has it
    assert planned.ready.tokens.train[:] == started.tokens.train[:] == resumed.tokens.train[:]


def test_another_tokenizer_brings_its_end_token(tiny_run, texts, other):
    run = tiny_run("sft", *texts, f"model.tokenizer={other}")
    setup = run.prepare()
    config = load_model(setup.start).config
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (121, 4, 1)
    assert setup.tokens.train[0]["input_ids"][-1] == 4


def test_a_tokenizer_larger_than_the_model_is_refused_before_weights_are_drawn(tiny_run, texts, tmp_path):
    words = {f"word{i}": i for i in range(130)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words))).save_pretrained(tmp_path / "large")
    run = tiny_run("sft", *texts, f"model.tokenizer={tmp_path / 'large'}")
    with pytest.raises(UserError, match=r"has 130 tokens, but vocab_size in config.json is only 121"):
        run.prepare()
    assert not run.folder.start.exists()


@pytest.mark.parametrize(
    ("token", "message"), [("<|assistant|>", "examples have token 121"), ("<|pad|>", "the padding is token 121")]
)
def test_a_token_without_an_embedding_is_refused_before_training(tiny_run, token, message):
    start = Path(tiny_run().prepare().start)
    described = json.loads((start / "tokenizer.json").read_text())
    (added,) = (each for each in described["added_tokens"] if each["content"] == token)
    described["model"]["vocab"][token] = added["id"] = 121
    shutil.copytree(start, start.parent.parent / "other")
    (start.parent.parent / "other" / "tokenizer.json").write_text(json.dumps(described))
    given = (f"model.name_or_path={start.parent.parent / 'other'}", "model.init_seed=null")
    with pytest.raises(UserError, match=f"model.tokenizer: {message}, but the model's vocab_size is only 121"):
        tiny_run("sft", *given, name="second").prepare()


@pytest.mark.parametrize(("overrides", "message"), [
    (["model.tokenizer={vocab_size: 280}", "model.init_seed=null"], "model.tokenizer: applies only to random weights"),
    (["model.tokenizer=280"], r"model.tokenizer: found 280; write tokenizer: \{vocab_size: 280\}"),
    (["model.tokenizer={vocab_size: 10}"], "model.tokenizer.vocab_size: found 10; write a number of at least 258"),
    (["model.tokenizer={vocabsize: 280}"], r"model.tokenizer.vocabsize: unknown key; did you mean 'vocab_size'"),
    (["model.tokenizer=./nothing"], "model.tokenizer: './nothing' has no tokenizer_config.json"),
])  # fmt: skip
def test_a_wrong_tokenizer_is_an_error_of_the_recipe(tiny_run, overrides, message):
    with pytest.raises(UserError, match=message):
        tiny_run("sft", *overrides)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "model.safetensors"])
def test_the_start_of_a_run_is_verified_by_content(tiny_run, name):
    """A missing tokenizer_config.json is no other tokenizer, and a changed letter no other vocabulary."""
    run = tiny_run()
    run.prepare()
    file = run.folder.start / name
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    for damage in (lambda: file.write_bytes(content), file.unlink):
        damage()
        message = rf"run/start: {name}: the content differs from what .*; remove this folder"
        with pytest.raises(UserError, match=message):
            starting_model.starting_checkpoint(run.recipe, run.folder)
    shutil.rmtree(run.folder.start)
    starting_model.starting_checkpoint(run.recipe, run.folder)
    starting_model.starting_checkpoint(run.recipe, run.folder)
