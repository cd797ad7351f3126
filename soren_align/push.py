"""A finished run's model to the Hugging Face hub, with what is needed to believe it: card, recipe and run.json.

Only when somebody asks. Weights go as safetensors; pickles, optimizer states, metrics and samples stay here.
"""

import json
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id

from .card import card, public
from .errors import UserError
from .recipe import adapter_config, load_resolved
from .run_folder import RunFolder

SENT = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""What weights, configs and tokenizers are in. A pickle (.bin, .pt, .pkl) runs code where it is loaded."""


def push(path: str, repo: str, *, merged: bool = False, private: bool = False, revision: str | None = None) -> str:
    """Upload the run's model, or its merged one; the page that it has on the hub then.

    All files arrive in one commit, or none. UserError, before anything is sent, for what should not or cannot be.
    """
    run = RunFolder(path)
    _refuse_name(repo)
    with run.locked():
        model = _model_of(run, merged)
        if constants.HF_HUB_OFFLINE:
            raise UserError("HF_HUB_OFFLINE is set; a push needs the hub: unset it")
        if get_token() is None:
            raise UserError("no token for the Hugging Face hub: run `hf auth login`, or set HF_TOKEN")
        try:
            with tempfile.TemporaryDirectory() as folder:
                _stage(Path(folder), run, model, repo, merged)
                return _upload(Path(folder), run, repo, private, revision)
        except (HTTPError, OSError) as error:  # the hub's answers are both
            raise UserError(f"{repo}: not uploaded: {' '.join(str(error).split())[:400]}") from error


def _upload(folder: Path, run: RunFolder, repo: str, private: bool, revision: str | None) -> str:
    api = HfApi()
    api.create_repo(repo, private=private or None, exist_ok=True)
    if private and not api.model_info(repo).private:  # it was there before, and exist_ok leaves it as it is
        raise UserError(f"{repo}: is there already and everybody can see it; choose another name, or leave --private")
    if revision:
        api.create_branch(repo, branch=revision, exist_ok=True)
    recipe = load_resolved(run.recipe)
    said = f"{recipe.task.upper()} with {recipe.optimizer.name}, by soren-align"
    api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=said)
    return f"{constants.ENDPOINT}/{repo}" + (f"/tree/{revision}" if revision else "")


def _stage(folder: Path, run: RunFolder, model: Path, repo: str, merged: bool) -> None:
    """Lay out what the repository shall hold: links to the model's files, and three that say what it is."""
    for file in model.iterdir():
        if file.suffix in SENT and file.is_symlink():
            raise UserError(
                f"{file}: is a link, and what it leads to may be no part of the model; put the file itself here"
            )
        if file.suffix in SENT and file.is_file():
            (folder / file.name).symlink_to(file.resolve())
    (folder / "README.md").write_text(card(run, repo.partition("/")[2], merged), encoding="utf-8")
    (folder / "recipe.yaml").write_text(run.recipe.read_text(encoding="utf-8"), encoding="utf-8")
    record = public(run.read() or {}, load_resolved(run.recipe))
    (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _model_of(run: RunFolder, merged: bool) -> Path:
    """The folder that is to be sent; UserError if it is not there, or nobody else could use it."""
    record = run.read()
    if record is None:
        raise UserError(f"{run}: is no run folder (run.json)")
    if record["status"] != "finished":
        raise UserError(
            f"{run}: is not finished (status: {record['status']}); the command that began it goes on, with --no-eval "
            "without its evaluation"
        )
    if (run.merged if merged else run.model).is_symlink():
        raise UserError(f"{run.merged if merged else run.model}: is a link; put the folder itself here")
    if not any(run.model.glob("*.safetensors")):
        raise UserError(f"{run}: has no model ({run.model} holds no safetensors)")
    adapter = adapter_config(run.model)
    if merged and adapter is None:
        raise UserError(f"{run}: trained no adapter; {run.model} is a whole model already, leave --merged out")
    if merged:
        if not run.is_merged():
            raise UserError(f"{run.merged}: is no merge of this run's adapter; run `soren-align merge {run}` first")
        return run.merged
    if adapter and Path(adapter["base_model_name_or_path"]).is_absolute():
        raise UserError(
            f"{run}: is an adapter of a folder on this machine, which nobody else has. Make a whole model of it with "
            f"`soren-align merge {run}`, and push that with --merged"
        )
    return run.model


def _refuse_name(repo: str) -> None:
    if repo.count("/") != 1:
        raise UserError(f"{repo}: write OWNER/NAME, your name or an organisation's on the hub, then the model's")
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise UserError(str(error)) from None
