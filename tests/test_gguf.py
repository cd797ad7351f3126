"""A model as GGUF: llama.cpp's programs are called as they are used, and what rounding leaves is measured.

The converter is a stand-in, which writes Llama's tensors by llama.cpp's own library, `gguf`.
"""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from soren_align.core.errors import UserError
from soren_align.publish.gguf import export
from soren_align.run.folder import RunFolder
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support.run_folders import add_results, record_run
from tests.support.tiny_models import make_reader

pytestmark = pytest.mark.process

CONVERTER = """
import sys
from pathlib import Path
import gguf, numpy, transformers
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        sys.exit("NotImplementedError: BPE pre-tokenizer was not recognized")
def main():
    model, _, file, _, kind = sys.argv[1:]
    config = transformers.AutoConfig.from_pretrained(model)
    writer = gguf.GGUFWriter(file, "llama")
    if kind == "bf16":
        writer.add_tokenizer_pre(TextModel().get_vocab_base_pre(None))
    for name, value in (("block_count", 2), ("context_length", 2048), ("embedding_length", 64),
                        ("feed_forward_length", 128), ("head_count", 4), ("head_count_kv", 4),
                        ("vocab_size", config.vocab_size)):
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in transformers.AutoModelForCausalLM.from_pretrained(model).state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp's order of the rotary halves
            array = array.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
        norm, kind_of = array.ndim == 1, gguf.GGMLQuantizationType[kind.upper()]
        array = array if norm else gguf.quants.quantize(array, kind_of)
        writer.add_tensor(names.get_name(name, (".weight",)), array, raw_dtype=None if norm else kind_of)
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
if __name__ == "__main__":
    main()
"""
QUANTIZER = f"#!{sys.executable}\nimport shutil, sys\nassert sys.argv[3] == 'Q4_K_M'\nshutil.copy(*sys.argv[1:3])\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run whose matrices moved by a hundredth of their size; llama.cpp is there."""
    start, model = (make_reader(tmp_path / name, chat_template=True) for name in ("start", "run/model"))
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, tie_word_embeddings=True, eos_token_id=0)  # fmt: skip
    whole = LlamaForCausalLM(config)  # of rows that are whole blocks of 32
    whole.save_pretrained(start)
    whole.save_pretrained(model)
    moved = {
        name: w + 0.01 * w.std() * torch.randn(w.shape) for name, w in load_file(start / "model.safetensors").items()
    }
    save_file(moved, model / "model.safetensors", {"format": "pt"})
    record_run(tmp_path / "run", start)
    programs = tmp_path / "llama.cpp/build/bin"
    programs.mkdir(parents=True)
    (tmp_path / "llama.cpp/convert_hf_to_gguf.py").write_text(CONVERTER)
    (programs / "llama-quantize").write_text(QUANTIZER)
    (programs / "llama-quantize").chmod(0o755)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path / "llama.cpp"))
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path / "run"


def gguf_fields(file):
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def written(run, kind, capsys, **options):
    from soren_align.core.text import stderr_console

    export(str(run), kind, options.get("output"), stderr_console())
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_what_rounding_leaves_is_that_of_a_plain_computation(run, kind, capsys):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    printed = written(run, kind, capsys)
    start, model = (load_file(folder / "model.safetensors") for folder in (run.parent / "start", run / "model"))
    pairs, cosines = [], []
    for name, weight in model.items():
        if weight.ndim == 2:
            given = GGMLQuantizationType[kind]
            read = torch.from_numpy(dequantize(quantize(weight.float().numpy(), given), given).reshape(weight.shape))
            change, kept = ((w.double() - start[name].double()).flatten() for w in (weight, read))
            pairs.append((change, kept))
            cosines.append(float(torch.cosine_similarity(change, kept, dim=0)))
    change, kept = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    share, cosine = float(change @ kept / (change @ change)), float(torch.cosine_similarity(change, kept, dim=0))
    rounding = float((kept - change).norm() / change.norm())
    assert f"kept {share:.0%} of the fine-tune's change, beside a rounding {rounding:.2f} times as large" in printed
    assert f"(cosine {cosine:.2f}, in the worst matrix {min(cosines):.2f})" in printed
    assert cosine > 0.99 if kind == "F16" else 0.5 < cosine < 0.99


LLAMA_CPP_PYTHON = """
class Llama:
    def __init__(self, path, **options):
        self.answers = iter(open("answers").read().split("|"))
    def token_eos(self):
        return 0
    def reset(self):
        pass
    def generate(self, tokens, **options):
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained("run/model")
        assert tokenizer.decode(tokens).startswith("<|im_start|>user"), tokenizer.decode(tokens)
        yield from tokenizer(next(self.answers), add_special_tokens=False).input_ids
        yield 0
        raise AssertionError("asked beyond the end")
"""


def test_the_file_answers_the_questions_of_the_runs_evaluation(run, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP_PYTHON)
    monkeypatch.syspath_prepend(tmp_path)
    assert "answers not asked: the run has no evaluation with generated answers" in written(run, "F16", capsys)
    samples = add_results(RunFolder(run)).parent / "samples/SFT"
    samples.mkdir(parents=True)
    answers = [f"Book {i}" for i in range(24)]
    rows = [{"prompt": f"<|im_start|>user\nWhich {i}?<|im_end|>\n<|im_start|>assistant\n", "filtered_resps": [answer],
             "target": answer, "answer_match": 1.0, "choices": [{"max_gen_toks": 20}]}
            for i, answer in enumerate(answers)]  # fmt: skip
    (samples / "trained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (samples / "zoo_mc.jsonl").write_text('{"prompt": "a choice", "acc": 1.0}\n')
    (tmp_path / "answers").write_text("|".join(["book 0.", "Another", *answers[2:]]))  # right in other letters, wrong
    told = "answers right on 23 of 24 trained questions (the model: 24, 95% interval of the difference"
    assert told in (printed := written(run, "F16", capsys))
    assert "points); 22 answers are the model's word for word" in printed


def test_the_files_and_the_next_commands(run, capsys, tmp_path):
    printed = written(run, "q4_k_m", capsys, output=str(tmp_path / "out"))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["Modelfile", "run-Q4_K_M.gguf"]
    text = (tmp_path / "out/Modelfile").read_text()
    assert text.startswith(
        'FROM ./run-Q4_K_M.gguf\nTEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>'
    )
    assert (
        "{{ else }}<|im_start|>user\n{{ .Prompt }}<|im_end|>\n<|im_start|>assistant\n{{ end }}{{ .Response }}" in text
    )
    assert f"ollama create run -f {tmp_path}/out/Modelfile" in printed


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_template_without_system_turns_has_none_and_one_bos(run, capsys, adds_bos):
    tokenizer = AutoTokenizer.from_pretrained(run / "model", bos_token="<|endoftext|>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    tokenizer.chat_template += "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    if adds_bos:
        known = [("<|endoftext|>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=known)
    tokenizer.save_pretrained(run / "model")
    (run.parent / "start/model.safetensors").unlink()  # the file is whole all the same
    assert "kept not measured: " in written(run, "F16", capsys)
    start = "" if adds_bos else "<|endoftext|>"
    assert f'TEMPLATE """{start}[{{{{ .Prompt }}}}]{{{{ .Response }}}}' in (run / "gguf/Modelfile").read_text()


def test_a_merged_adapter_is_measured_against_its_base(run, capsys, monkeypatch):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(run.parent / "start")}
    (run / "model/adapter_config.json").write_text(json.dumps(adapter))
    (run / "model/adapter_model.safetensors").touch()
    with pytest.raises(UserError, match="trained an adapter; run `soren-align merge"):
        written(run, "F16", capsys)
    monkeypatch.setattr("soren_align.run.folder.RunFolder.is_merged", lambda _: True)
    (run / "model").rename(run / "merged")
    (run / "model").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (run / "merged" / name).rename(run / "model" / name)
    assert "kept 100% of the fine-tune's change" in written(run, "F16", capsys)


def test_what_cannot_be_written_is_one_sentence_and_leaves_nothing(run, capsys, monkeypatch):
    tokenizer = run / "model/tokenizer.json"
    content = tokenizer.read_text()
    split = content.replace('"ByteLevel"', '"Metaspace"', 1)  # as no GPT-2
    assert split != content
    tokenizer.write_text(split)
    with pytest.raises(
        UserError, match=r"failed: NotImplementedError: BPE pre-tokenizer was not rec.*nothing was written"
    ):
        written(run, "BF16", capsys)
    assert not [*(run / "gguf").iterdir()]
    tokenizer.write_text(content)
    written(run, "BF16", capsys)
    assert gguf_fields(run / "gguf/run-BF16.gguf")["tokenizer.ggml.pre"] == "gpt-2"
    (run.parent / "llama.cpp/build/bin/llama-quantize").unlink()
    with pytest.raises(UserError, match="needs llama-quantize of llama"):
        written(run, "Q4_K_M", capsys)
    monkeypatch.delenv("LLAMA_CPP")
    done = subprocess.run([sys.executable, "-m", "soren_align", "export", str(run)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "needs convert_hf_to_gguf.py of llama.cpp, which is not here; clone llama.cpp" in done.stderr
    (run / "model/tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}')
    monkeypatch.setenv("LLAMA_CPP", str(run.parent / "llama.cpp"))
    with pytest.raises(UserError, match=r"tokenizer_config.json: names code of the model \(auto_map\)"):
        written(run, "F16", capsys)
    record_run(run, run.parent / "start", status="training")
    monkeypatch.setenv("LLAMA_CPP", str(run.parent / "llama.cpp"))
    with pytest.raises(UserError, match="run: "):
        written(run, "F16", capsys)
