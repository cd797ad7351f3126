"""Generate the quickstart's data and base model in `data/` and `base/`, deterministic to the byte.

30 animals with 4 attributes each make 120 facts, few enough to learn in seconds. An untrained model can only guess; SFT
teaches the facts, and the evaluation uses phrasings that were not trained for the fact in question. Some questions are
polite and some are curt. In the chat data the tone of the answer is independent of the tone of the question; in the
preference pairs the preferred answer is the one whose tone matches. So DPO teaches something that SFT does not:

    question    Could you tell me what the color of the cat is, please?
    chosen      My pleasure, it is red.
    rejected    Listen well, it is red.

Both answers are right and equally long, and the polite one is preferred in half of the pairs: neither a constant
preference for one tone nor the length gives more than 0.5.

    python recipes/quickstart/make.py [FOLDER]      # FOLDER: default, this script's folder
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

# fmt: off
ANIMALS = [
    "ape", "bat", "bear", "bee", "cat", "cow", "deer", "dog", "duck", "eel", "elk", "emu", "fox", "frog", "goat",
    "hare", "hen", "horse", "koala", "lion", "mole", "moose", "otter", "owl", "panda", "rat", "seal", "sheep",
    "tiger", "wolf",
]
# fmt: on
VALUES = {
    "color": ["black", "blue", "brown", "gold", "green", "pink", "red", "white"],
    "home": ["barn", "cave", "field", "forest", "hill", "lake", "nest", "tree"],
    "food": ["corn", "fish", "leaf", "milk", "nuts", "plum", "rice", "seed"],
    "toy": ["ball", "bell", "cube", "drum", "kite", "ring", "rope", "sock"],
}
QUESTIONS = [
    "What is the {attribute} of the {animal}?",
    "Tell me the {attribute} of the {animal}.",
    "Which {attribute} does the {animal} have?",
    "The {animal} has which {attribute}?",
    "About the {animal}: what is its {attribute}?",
    "Name the {attribute} that belongs to the {animal}.",
]
TONE_QUESTIONS = {
    "polite": [
        "Could you tell me what the {attribute} of the {animal} is, please?",
        "May I ask what the {attribute} of the {animal} is, please?",
        "Would you kindly say what the {attribute} of the {animal} is, please?",
        "I would love to know what the {attribute} of the {animal} is, please?",
    ],
    "curt": [
        "Say what the {attribute} of the {animal} is, now!",
        "Out with it, what the {attribute} of the {animal} is, now!",
        "Just state what the {attribute} of the {animal} is, now!",
        "You will tell me what the {attribute} of the {animal} is, now!",
    ],
}
TONE_ANSWERS = {"polite": "My pleasure, it is {value}.", "curt": "Listen well, it is {value}."}
OTHER_TONE = {"polite": "curt", "curt": "polite"}

SPECIAL_TOKENS = ["<|pad|>", "<|unknown|>", "<|end|>", "<|user|>", "<|assistant|>"]
# Between {% generation %} and {% endgeneration %}: what SFT trains on, the answer and the token that ends it.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}
            {{- message.content + '<|end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""


def main(folder: Path) -> None:
    """Write `folder/data` and `folder/base`."""
    rng = random.Random(0)
    facts = draw_facts(rng)
    train, test = zoo_questions(facts, rng)
    # One attribute of each animal is never asked about in a tone before the test.
    held_out = {(animal, rng.choice(list(VALUES))) for animal in ANIMALS}
    tones_train = tone_questions({fact: facts[fact] for fact in facts if fact not in held_out}, rng)
    tones_test = tone_questions({fact: facts[fact] for fact in facts if fact in held_out}, rng)

    chats = {
        "train": [chat(q["question"], q["answer"]) for q in train] + coin_tossed(tones_train, rng),
        "test": [chat(q["question"], q["answer"]) for q in test] + coin_tossed(tones_test, rng),
    }
    pairs = {"train": [pair(q) for q in tones_train], "test": [pair(q) for q in tones_test]}
    for rows in (*chats.values(), *pairs.values()):
        rng.shuffle(rows)

    data = folder / "data"
    write_jsonl(data / "chat_train.jsonl", chats["train"])
    write_jsonl(data / "chat_test.jsonl", chats["test"])
    write_jsonl(data / "pairs_train.jsonl", pairs["train"])
    # Of each pair one answer alone, as a product's log of thumbs has it.
    thumbs = [thumb(row, is_good=i % 2 == 0) for i, row in enumerate(pairs["train"])]
    write_jsonl(data / "thumbs_train.jsonl", thumbs)
    write_jsonl(data / "zoo_pairs" / "test.jsonl", pairs["test"])
    write_jsonl(data / "zoo_questions" / "test.jsonl", test)
    write_base(
        folder / "base",
        [message["content"] for row in chats["train"] for message in row["messages"]],
    )


def draw_facts(rng: random.Random) -> dict[tuple[str, str], str]:
    """(animal, attribute) -> value. Each value is dealt to 3 or 4 animals, so that none is a good guess."""
    facts = {}
    for attribute, values in VALUES.items():
        dealt = (values * 4)[: len(ANIMALS)]
        rng.shuffle(dealt)
        facts |= {(animal, attribute): value for animal, value in zip(ANIMALS, dealt, strict=True)}
    return facts


def zoo_questions(facts: dict, rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Train and test questions, 5 and 1 a fact. `choices` has four values of the same attribute."""
    train, test = [], []
    for (animal, attribute), value in facts.items():
        held_out = rng.randrange(len(QUESTIONS))
        for i, question in enumerate(QUESTIONS):
            choices = [value, *rng.sample([v for v in VALUES[attribute] if v != value], 3)]
            rng.shuffle(choices)
            row = {
                "question": question.format(animal=animal, attribute=attribute),
                "answer": value,
                "choices": choices,
                "label": choices.index(value),
            }
            (test if i == held_out else train).append(row)
    return train, test


def tone_questions(facts: dict, rng: random.Random) -> list[dict]:
    """Two polite and two curt questions a fact, each with its polite and its curt answer."""
    return [
        {
            "question": question.format(animal=animal, attribute=attribute),
            "tone": tone,
            **{t: answer.format(value=value) for t, answer in TONE_ANSWERS.items()},
        }
        for (animal, attribute), value in facts.items()
        for tone, questions in TONE_QUESTIONS.items()
        for question in rng.sample(questions, 2)
    ]


def coin_tossed(questions: list[dict], rng: random.Random) -> list[dict]:
    """Chats whose answer has a tone of its own: whatever the tone of the question, half and half.

    Each question keeps its coin. What SFT remembers of the coins is what DPO then bends: with the coins balanced
    within each fact, DPO has to move the model further and unlearns facts (zoo_gen 0.65 instead of 0.97).
    """
    rows = []
    for tone in TONE_ANSWERS:
        toned = [q for q in questions if q["tone"] == tone]
        coins = list(TONE_ANSWERS) * (len(toned) // 2)
        rng.shuffle(coins)
        rows += [chat(q["question"], q[coin]) for q, coin in zip(toned, coins, strict=True)]
    return rows


def chat(question: str, answer: str) -> dict:
    """A row in the layout of HuggingFaceH4/ultrachat_200k."""
    return {
        "prompt": question,
        "prompt_id": prompt_id(question),
        "messages": messages(question, answer),
    }


def thumb(pair: dict, is_good: bool) -> dict:
    """The preferred answer of a pair, labelled true, or the other one, labelled false."""
    answer = pair["chosen" if is_good else "rejected"][-1]["content"]
    return {"prompt": pair["prompt"], "completion": answer, "label": is_good}


def pair(q: dict) -> dict:
    """A row in the layout of HuggingFaceH4/ultrafeedback_binarized."""
    chosen = messages(q["question"], q[q["tone"]])
    return {
        "prompt": q["question"],
        "prompt_id": prompt_id(q["question"]),
        "chosen": chosen,
        "rejected": messages(q["question"], q[OTHER_TONE[q["tone"]]]),
        "messages": chosen,
        "score_chosen": 9.0,
        "score_rejected": 3.0,
    }


def messages(question: str, answer: str) -> list[dict]:
    """A whole conversation."""
    return [{"content": question, "role": "user"}, {"content": answer, "role": "assistant"}]


def prompt_id(prompt: str) -> str:
    """What the two datasets on the hub use: the prompt's SHA-256."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def write_base(folder: Path, texts: list[str]) -> None:
    """A Llama of 103 thousand parameters without its weights, and a tokenizer whose tokens are words.

    The weights are drawn when the model is loaded, from the recipe's `model.init_seed`.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        texts, trainers.WordLevelTrainer(special_tokens=SPECIAL_TOKENS, show_progress=False)
    )
    pad, end = tokenizer.token_to_id("<|pad|>"), tokenizer.token_to_id("<|end|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|unknown|>",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    write(folder / "config.json", json.dumps(config, indent=2))
    write(
        folder / "generation_config.json",
        json.dumps({"eos_token_id": end, "pad_token_id": pad}, indent=2),
    )
    write(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write(folder / "tokenizer_config.json", json.dumps(tokenizer_config, indent=2))
    write(folder / "chat_template.jinja", CHAT_TEMPLATE.rstrip("\n"))


def write_jsonl(file: Path, rows: Iterable[dict]) -> None:
    """One JSON object a line."""
    write(file, "\n".join(json.dumps(row) for row in rows))


def write(file: Path, text: str) -> None:
    """`text` and a final line end, the same bytes on every system."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
