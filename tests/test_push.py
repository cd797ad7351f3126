"""A push sends a finished run's weights with what is needed to believe them, and nothing else; or says why not."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi
from soren_align.core.errors import UserError
from soren_align.publish import push as pushing
from soren_align.publish.push import push
from soren_align.run.folder import MERGED_FROM, RunFolder
from soren_align.run.provenance import fingerprint

from tests.support.run_folders import HUB, add_results, finished_run, lock_of_another_process


class Recorder:
    """The hub as huggingface_hub's API shows it; `calls` is what was asked, `sent` the files that arrived."""

    def __init__(self, there_and_public=False, refuses=None):
        self.there_and_public, self.refuses = there_and_public, refuses
        self.calls, self.sent = [], {}

    def __call__(self):
        return self

    def create_repo(self, repo, **how):
        self.calls.append(("create_repo", repo, how))
        self.private = bool(how["private"]) and not self.there_and_public

    def model_info(self, repo):
        return SimpleNamespace(private=self.private)

    def create_branch(self, repo, **how):
        self.calls.append(("create_branch", repo, how))

    def upload_folder(self, folder_path, **how):
        self.calls.append(("upload_folder", how))
        if self.refuses:
            raise self.refuses
        real = HfApi()
        real._validate_yaml = lambda **_: None  # asks the hub
        for file in real._prepare_upload_folder_additions(folder_path, ""):
            self.sent[file.path_in_repo] = Path(file.path_or_fileobj).read_bytes()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    def make(**how):
        recorder = Recorder(**how)
        monkeypatch.setattr(pushing, "HfApi", recorder)
        return recorder

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pushing.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(pushing, "get_token", lambda: "hf_x")
    return make


@pytest.fixture
def there(hub):
    return hub()


@pytest.fixture
def run(hub):
    return finished_run("run")


def test_the_model_arrives_with_card_recipe_and_manifest_and_without_pickles(there, run, tmp_path):
    assert push("run", "me/zoo") == "https://huggingface.co/me/zoo"
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert there.sent.keys() == model | {"README.md", "recipe.yaml", "run.json"}
    assert there.sent["model.safetensors"] == b"weights"
    assert b"# zoo: SFT with Soren from random weights\n" in there.sent["README.md"]
    assert there.sent["recipe.yaml"].decode() == run.recipe.read_text()
    assert json.loads(there.sent["run.json"])["start"]["path"] == "shipped:recipes/quickstart/base"
    assert not [name for name, text in there.sent.items() if str(tmp_path).encode() in text]
    assert there.calls == [
        ("create_repo", "me/zoo", {"private": None, "exist_ok": True}),
        ("upload_folder", {"repo_id": "me/zoo", "revision": None, "commit_message": "SFT with soren, by soren-align"}),
    ]


def test_files_that_are_no_part_of_a_model_stay_here_and_are_named(there, run, capsys):
    strangers = ("secrets.json", "notes.txt", "wandb.json", ".netrc.txt", "id.model", "tokenizer.json.bak")
    for name in strangers:
        (run.model / name).write_text("password")
    (run.model / "model.safetensors.index.json").write_text("{}")
    (run.model / "merges.txt").write_text("a b")
    push("run", "me/zoo")
    assert not there.sent.keys() & {*strangers}
    assert {"model.safetensors.index.json", "merges.txt"} <= there.sent.keys()
    said = capsys.readouterr().err
    assert all(name in said for name in strangers)
    assert "left out" in said


def test_no_path_of_this_machine_leaves_in_recipe_card_manifest_or_configuration(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home/jane doe")
    private, there = str(tmp_path / "home/jane doe/My data"), hub()
    own = tmp_path / "home/jane doe/My data/chat.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text('{"prompt": "a", "completion": "b"}\n')
    run = finished_run(f"{private}/run", f"data.train.path={own}", f"eval.data_root={private}",
                       'run.samples={"prompts": ["Is /etc/hosts read?"]}')  # fmt: skip
    source = {"path": str(own), "split": "all", "sha256": "d" * 64, "num_kept": 9, "dropped": {}}
    run.update(data={"train": source, "eval": None}, extends=["~/recipes/base.yaml", "../jane/other.yaml"])
    add_results(run, data=private, title=f"Zoo: on the data in {private}")
    (run.model / "tokenizer_config.json").write_text(json.dumps({"name_or_path": private, "unk_token": "/a/b"}))
    push(str(run.path), "me/zoo")
    for name, content in there.sent.items():
        assert not [word for word in (str(tmp_path), "jane") if word in content.decode()], name
    recipe = there.sent["recipe.yaml"].decode()
    assert "path: '.../chat.jsonl'\n" in recipe
    assert "output_dir: '.../run'\n" in recipe
    assert json.loads(there.sent["run.json"])["extends"] == [".../base.yaml", ".../other.yaml"]
    assert json.loads(there.sent["tokenizer_config.json"]) == {"name_or_path": ".../My data", "unk_token": "/a/b"}
    assert recipe in there.sent["README.md"].decode()


def test_a_dry_run_names_every_file_with_its_size_and_needs_no_hub(there, run, monkeypatch):
    (run.model / "notes.txt").write_text("mine")
    monkeypatch.setattr(pushing.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(pushing, "get_token", lambda: None)
    with monkeypatch.context() as read_only:
        read_only.setattr(pushing.os, "access", lambda *_: False)
        read_only.setattr(RunFolder, "lock", lambda *_, **__: pytest.fail("a lock file on a read-only disk"))
        lines = push("run", "me/zoo", dry_run=True).splitlines()
    assert there.calls == []
    assert lines[0] == "me/zoo would receive"
    sizes = {line.split()[-1]: " ".join(line.split()[:-1]) for line in lines[1:]}
    monkeypatch.setattr(pushing.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(pushing, "get_token", lambda: "hf_x")
    push("run", "me/zoo")
    assert sizes.keys() == there.sent.keys()
    assert sizes["model.safetensors"] == "0.01 kB"


def test_a_branch_is_made_and_a_new_repository_private(there, run):
    assert push("run", "me/zoo", private=True, revision="soren").endswith("me/zoo/tree/soren")
    assert there.calls[0] == ("create_repo", "me/zoo", {"private": True, "exist_ok": True})
    assert there.calls[1] == ("create_branch", "me/zoo", {"branch": "soren", "exist_ok": True})
    assert there.calls[2][1]["revision"] == "soren"


def test_a_private_push_does_not_go_to_a_public_repository(hub, run):
    there = hub(there_and_public=True)
    with pytest.raises(UserError, match="me/zoo: exists already and is public"):
        push("run", "me/zoo", private=True)
    assert there.sent == {}


def test_an_adapter_of_a_model_on_the_hub_is_sent_and_one_of_a_folder_is_not(hub, tmp_path):
    there = hub()
    finished_run("lora", *HUB, "model.lora={}", adapter_of="Qwen/Qwen2.5-0.5B")
    push("lora", "me/zoo")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= there.sent.keys()
    here = hub()
    finished_run("here", "model.lora={}", adapter_of=str(tmp_path / "here" / "start"))
    with pytest.raises(UserError, match=r"base model is a folder on this machine.*`soren-align merge here`.*--merged"):
        push("here", "me/zoo")
    assert here.calls == []


def test_what_was_merged_is_sent_only_if_it_is_of_this_adapter(hub, tmp_path):
    there, run = hub(), finished_run("run", "model.lora={}", adapter_of=str(tmp_path / "run" / "start"))
    with pytest.raises(UserError, match="run `soren-align merge run` first"):
        push("run", "me/zoo", merged=True)
    run.merged.mkdir()
    (run.merged / "model.safetensors").write_text("whole")
    (run.merged / MERGED_FROM).write_text(json.dumps({"adapter_sha256": fingerprint(str(run.model))}))
    with pytest.raises(UserError, match=r"Push the merged model \S*run/merged with --merged"):
        push("run", "me/zoo")
    push("run", "me/zoo", merged=True)
    assert there.sent["model.safetensors"] == b"whole"
    assert b"library_name: transformers" in there.sent["README.md"]
    assert "adapter_config.json" not in there.sent


@pytest.mark.parametrize(("spoil", "how", "message"), [
    (lambda run: run.update(status="training"), {}, r"run: the run is not finished \(status: training\)"),
    (lambda run: run.update(status="trained"), {}, "with --no-eval to skip the evaluation"),
    (lambda run: (run.model / "model.safetensors").unlink(), {}, "run: has no model"),
    (lambda run: (run.path / "run.json").unlink(), {}, "run: has no run.json"),
    (lambda run: None, {"merged": True}, "has no adapter to merge"),
    (lambda run: None, {"repo": "zoo"}, "zoo: is no OWNER/NAME"),
    (lambda run: None, {"repo": "me/a/b"}, "me/a/b: is no OWNER/NAME"),
    (lambda run: None, {"repo": "me/ä"}, "Repo id must use alphanumeric"),
])  # fmt: skip
def test_what_cannot_be_sent_is_refused_before_the_hub_is_asked(there, run, spoil, how, message):
    spoil(run)
    with pytest.raises(UserError, match=message):
        push("run", **{"repo": "me/zoo", **how})
    assert there.calls == []


def test_without_the_hub_or_a_token_nothing_is_tried(there, run, monkeypatch):
    monkeypatch.setattr(pushing, "get_token", lambda: None)
    with pytest.raises(UserError, match=r"no token .* `hf auth login`, or set HF_TOKEN"):
        push("run", "me/zoo")
    monkeypatch.setattr(pushing.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        push("run", "me/zoo")
    assert there.calls == []


def test_a_run_that_is_running_is_not_sent(there, run):
    held = pytest.raises(UserError, match="another process is training or evaluating this run")
    with lock_of_another_process(run), held:
        push("run", "me/zoo")
    assert there.calls == []
