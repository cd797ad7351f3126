"""The account of what will be trained, held to TRL's own preprocessing; and the example that a person reads."""

import pytest
from datasets import Dataset
from rich.console import Console
from soren_align.data import dataset_stats, load_split, show_example, tokenize
from soren_align.data.encode import encode
from soren_align.tasks import TASKS
from soren_align.training.trainer import SorenDPOTrainer
from tests.support.conversations import CHATML, chat, chat_row, pair_row, split
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

NUM_ROWS = 24


@pytest.fixture(scope="module")
def checkpoint(make_tokenizer, tmp_path_factory):
    """A folder with a tiny Llama and the tokenizer; DPO copies its reference model from a folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def rows(write):
    """24 chats, or pairs: one to three exchanges, some with a system turn, of very different lengths."""

    def load(task):
        make = chat_row if task == "sft" else pair_row
        made = [make(i, turns=1 + i % 3, system=i % 4 == 0) for i in range(NUM_ROWS)]
        return load_split(split(write(f"{task}.jsonl", made)), task).dataset

    return load


def settings(folder, **how):
    return {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, **how}


@pytest.mark.parametrize("assistant_only_loss", [True, False])
@pytest.mark.parametrize("max_length", [None, 60, 100, 200])
def test_sft_is_counted_as_trl_does(checkpoint, rows, tmp_path, max_length, assistant_only_loss):
    dataset, tokenizer = rows("sft"), AutoTokenizer.from_pretrained(checkpoint)
    ours = dataset_stats(dataset, "sft", tokenizer, max_length=max_length, assistant_only_loss=assistant_only_loss)
    args = SFTConfig(**settings(tmp_path, max_length=max_length, assistant_only_loss=assistant_only_loss))
    theirs = SFTTrainer(checkpoint, args, train_dataset=dataset, processing_class=tokenizer).train_dataset
    labels = [label for row in theirs["labels"] for label in row]
    assert ours.num_kept == len(theirs)
    assert ours.num_kept + sum(ours.dropped.values()) == ours.num_examples == NUM_ROWS
    assert ours.num_tokens == len(labels)
    assert ours.num_trained_tokens == sum(label != -100 for label in labels)
    trained = [label for label in theirs[0]["labels"] if label != -100]
    assert "".join(text for text, is_trained in ours.example if is_trained) == tokenizer.decode(trained)
    assert "".join(text for text, _ in ours.example) == tokenizer.decode(theirs[0]["input_ids"])
    if max_length == 60 and assistant_only_loss:  # this length does drop some rows
        assert 0 < ours.num_kept < NUM_ROWS
    if max_length:
        assert ours.num_truncated > 0


def counted_as_dpo(checkpoint, dataset, tokenizer, folder, max_length):
    """The account of pairs, which is that of TRL's batch."""
    ours = dataset_stats(dataset, "dpo", tokenizer, max_length=max_length)
    args = DPOConfig(**settings(folder, max_length=max_length))
    trainer = DPOTrainer(checkpoint, args=args, train_dataset=dataset, processing_class=tokenizer)
    theirs = trainer.train_dataset
    batch = trainer.data_collator([theirs[i] for i in range(len(theirs))])
    assert ours.num_kept == len(theirs)
    assert ours.num_tokens == batch["attention_mask"].sum()
    assert ours.num_trained_tokens == batch["completion_mask"].sum()
    assert ours.example[0] == (tokenizer.decode(theirs[0]["prompt_ids"]), False)
    return ours


# The second prompt is no prefix of the conversation, and half of it opens every rejected answer: TRL starts both
# completions where the first of them parts from the prompt.
@pytest.mark.parametrize("generation_prompt", ["assistant\n", "assistant\nI do think: "])
@pytest.mark.parametrize("max_length", [None, 60, "a prompt's length", 200])
def test_dpo_is_counted_as_trl_does(checkpoint, rows, tmp_path, max_length, generation_prompt):
    dataset, tokenizer = rows("dpo"), AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = CHATML.replace("<|im_start|>assistant\n", f"<|im_start|>{generation_prompt}")
    if isinstance(max_length, str):  # the boundary itself: such a row is dropped
        prompt = [*dataset[5]["chosen"][:-1], {"role": "assistant", "content": ""}]
        max_length = len(tokenizer.apply_chat_template(prompt)["input_ids"]) - 2  # without the stop token and "\n"
    ours = counted_as_dpo(checkpoint, dataset, tokenizer, tmp_path, max_length)
    assert ours.num_kept + sum(ours.dropped.values()) == ours.num_examples == NUM_ROWS
    assert [trained for _, trained in ours.example] == [False, True, True]
    if max_length:
        assert 0 < ours.num_kept < NUM_ROWS
        assert ours.num_truncated > 0


TEXT = [f"{'Please tell me: ' * (i % 4)}what about animal {i}?" for i in range(NUM_ROWS)]
PLAIN = {
    "text": [{"text": text + ("<|im_end|>" if i == 0 else "")} for i, text in enumerate(TEXT)],
    "completions": [
        {"prompt": text, "completion": " It eats " + "hay " * (i % 9) + "ü."} for i, text in enumerate(TEXT)],
}  # fmt: skip
PLAIN_PAIRS = {
    "texts": [{"prompt": text, "chosen": " Hay " * (1 + i % 5), "rejected": " no"} for i, text in enumerate(TEXT)],
    "answers as turns": [{"prompt": text, "chosen": chat(i)[-1:], "rejected": [{"role": "assistant", "content": "No."}]}
                         for i, text in enumerate(TEXT)],
}  # fmt: skip


TURNS = [{"prompt": chat(i)[:-1], "completion": chat(i)[-1:]} for i in range(NUM_ROWS)]
MANY = {"prompt": chat(1, turns=2, system=True)[:-2], "completion": chat(1, turns=2, system=True)[-2:]}


@pytest.mark.parametrize("assistant_only_loss", [False, True])
@pytest.mark.parametrize(("completion_only_loss", "max_length"), [(None, None), (None, 60), (False, None)])
def test_of_a_completion_in_turns_the_completion_is_trained(
    checkpoint, write, tmp_path, completion_only_loss, max_length, assistant_only_loss
):
    dataset = load_split(split(write("rows.jsonl", [*TURNS, MANY])), "sft").dataset
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    how = {"assistant_only_loss": assistant_only_loss, "max_length": max_length}
    only = completion_only_loss is not False
    every = encode(dataset[:], "sft", tokenizer, assistant_only_loss, only)
    rows = [row.sides[0].truncated(max_length) for row in every if row.drop_reason(max_length) is None]
    args = SFTConfig(**settings(tmp_path, completion_only_loss=completion_only_loss, **how))
    theirs = SFTTrainer(checkpoint, args, train_dataset=dataset, processing_class=tokenizer).train_dataset
    assert [row.ids for row in rows] == list(theirs["input_ids"])
    assert [row.trained for row in rows] == [[label != -100 for label in row] for row in theirs["labels"]]
    counted = dataset_stats(dataset, "sft", tokenizer, completion_only_loss=only, **how)
    assert counted.num_kept == len(rows)
    assert (len(rows) < len(dataset)) == (max_length == 60)
    assert all("Animal" in text for text, trained in counted.example if trained)
    assert counted.example[0][1] == (not only and not assistant_only_loss)


@pytest.mark.parametrize("completion_only_loss", [None, False])
@pytest.mark.parametrize("max_length", [None, 30])
@pytest.mark.parametrize("form", PLAIN)
def test_the_other_forms_are_counted_as_trl_does(checkpoint, write, tmp_path, form, max_length, completion_only_loss):
    dataset = load_split(split(write("rows.jsonl", PLAIN[form])), "sft").dataset
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    only = completion_only_loss is not False
    ours = dataset_stats(dataset, "sft", tokenizer, max_length=max_length, completion_only_loss=only)
    args = SFTConfig(**settings(tmp_path, max_length=max_length, completion_only_loss=completion_only_loss))
    theirs = SFTTrainer(checkpoint, args, train_dataset=dataset, processing_class=tokenizer).train_dataset
    labels = [label for row in theirs["labels"] for label in row]
    assert ours.num_kept == len(theirs)
    assert ours.num_tokens == len(labels)
    assert ours.num_trained_tokens == sum(label != -100 for label in labels)
    assert ours.stop_token_trained or max_length
    if form == "completions":
        assert (ours.num_trained_tokens < ours.num_tokens) == only
        assert (ours.num_kept < NUM_ROWS) == (max_length == 30 and only)
    ids = theirs[0]["input_ids"] if ours.num_kept else []
    assert "".join(text for text, _ in ours.example) == tokenizer.decode(ids)


@pytest.mark.parametrize(("max_length", "template"), [(None, False), (30, False), (30, None)])
@pytest.mark.parametrize("form", PLAIN_PAIRS)
def test_the_other_forms_of_pairs_are_counted_as_trl_does(checkpoint, write, tmp_path, form, max_length, template):
    rows = split(write("rows.jsonl", PLAIN_PAIRS[form]), apply_chat_template=template)
    dataset = load_split(rows, "dpo").dataset
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    counted_as_dpo(checkpoint, dataset, tokenizer, tmp_path, max_length)


def test_lengths_are_percentiles_of_whole_rows(make_tokenizer):
    tokenizer = make_tokenizer()
    dataset = Dataset.from_list([{"messages": chat(i)} for i in range(100)])
    lengths = sorted(len(tokenizer.apply_chat_template(chat(i))["input_ids"]) for i in range(100))
    counted = dataset_stats(dataset, "sft", tokenizer, max_length=10)
    assert counted.lengths == {"p50": lengths[49], "p90": lengths[89], "p99": lengths[98], "max": lengths[99]}


def test_the_stop_token_counts_as_trained_only_when_the_loss_sees_it(make_tokenizer, rows):
    outside = CHATML.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}<|im_end|>")

    def trained(tokenizer, **how):
        return dataset_stats(rows("sft"), "sft", tokenizer, **{"max_length": None, **how}).stop_token_trained

    assert trained(make_tokenizer(), assistant_only_loss=True)
    assert trained(make_tokenizer())
    assert trained(make_tokenizer(outside))  # the whole conversation is trained
    assert not trained(make_tokenizer(outside), assistant_only_loss=True)
    assert not trained(make_tokenizer(eos="<|endoftext|>"))  # Qwen2.5 base: it would never stop
    assert not trained(make_tokenizer(), max_length=12)  # every stop token is cut off
    assert dataset_stats(rows("dpo"), "dpo", make_tokenizer(), max_length=None).stop_token_trained


@pytest.mark.parametrize(("unknown", "expected"), [("<|unknown|>", 3), ("<|im_end|>", 0), (None, 0)])
def test_unknown_tokens_are_counted_unless_they_end_texts(make_tokenizer, unknown, expected):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|unknown|>"]})
    tokenizer.unk_token = unknown
    messages = [{"role": "user", "content": "<|unknown|>"}, {"role": "assistant", "content": "A<|unknown|><|unknown|>"}]
    dataset = Dataset.from_list([{"messages": messages}, {"messages": chat(1)}])
    assert dataset_stats(dataset, "sft", tokenizer, max_length=None).num_unknown_tokens == expected


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_example_can_be_read_without_colour(make_tokenizer, task):
    row = (chat_row if task == "sft" else pair_row)(1)
    dataset = Dataset.from_list([{column: row[column] for column in TASKS[task].columns}])
    counted = dataset_stats(dataset, task, make_tokenizer(), max_length=None, assistant_only_loss=True)
    plain = show_example(counted, color=False).plain
    answer = row["messages"][1]["content"]
    assert f"[[{answer}<|im_end|>" in plain
    assert f"[[{row['messages'][0]['content']}" not in plain
    if task == "dpo":
        headings = ("prompt", "chosen", "rejected")
        assert tuple(line for line in plain.splitlines() if line in headings) == headings
    assert "[[" not in show_example(counted, color=True).plain


def test_the_example_cannot_command_the_terminal_nor_rich(make_tokenizer):
    said = "[bold]not markup[/nonsense] \x1b[31mred"
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": said + "x" * 2000}]
    counted = dataset_stats(Dataset.from_list([{"messages": messages}]), "sft", make_tokenizer(), max_length=None)
    console = Console(width=200, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(show_example(counted, color=False))
    assert "\x1b[31m" not in captured.get()
    assert "[bold]not markup[/nonsense]" in captured.get()
    assert "characters ..." in captured.get()


@pytest.mark.parametrize("packing", [{}, {"packing": True}, {"packing": True, "packing_strategy": "wrapped"}])
def test_tokens_of_turns_with_weights_reach_trl_unchanged(checkpoint, write, tmp_path, packing):
    made = [[{**turn, "weight": i % 2} if turn["role"] == "assistant" else turn for turn in chat(i)] for i in range(12)]
    made = [[*turns, *chat(i)] for i, turns in enumerate(made)]
    dataset = load_split(split(write("rows.jsonl", [{"messages": turns} for turns in made])), "sft").dataset
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens = tokenize(dataset, "sft", tokenizer, tmp_path / "cache", assistant_only_loss=True)
    args = SFTConfig(**settings(tmp_path, max_length=400, **packing))
    given = tokens.select_columns(["input_ids", "labels"])
    theirs = SFTTrainer(checkpoint, args, train_dataset=given, processing_class=tokenizer).train_dataset
    counted = dataset_stats(tokens, "sft", tokenizer, max_length=400)
    ids, labels = ([value for row in theirs[column] for value in row] for column in ("input_ids", "labels"))
    assert (len(ids), sum(label != -100 for label in labels)) == (counted.num_tokens, counted.num_trained_tokens)
    assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
    text = tokenizer.decode([label for label in labels if label != -100])
    assert text.count("<|im_end|>") == 12 + 6  # the second answer of each, and the first of every other


def test_tokens_of_pairs_are_those_that_trl_makes(checkpoint, rows, tmp_path):
    dataset, tokenizer = rows("dpo"), AutoTokenizer.from_pretrained(checkpoint)
    tokens = tokenize(dataset, "dpo", tokenizer, tmp_path / "cache").select_columns(TASKS["dpo"].token_columns)
    args = DPOConfig(**settings(tmp_path, max_length=100))
    theirs = DPOTrainer(checkpoint, args=args, train_dataset=dataset, processing_class=tokenizer).train_dataset
    ours = SorenDPOTrainer._prepare_dataset(None, tokens, tokenizer, args, "train")
    assert 0 < len(ours) < len(dataset)
    assert list(ours) == list(theirs.select_columns(TASKS["dpo"].token_columns))
