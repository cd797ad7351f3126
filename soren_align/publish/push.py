"""Upload a finished run's model to the Hugging Face hub, with its card, recipe and run.json.

Only files of a model are uploaded, by their names: a folder may hold notes and secrets. Pickles,
optimizer states, metrics and samples are not uploaded, but for the three answers in the card, and
no local path is (see `card.public`).
"""

import json
import os
import tempfile
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id

from ..core.errors import UserError, in_one_line
from ..core.files import read_json
from ..core.text import print_labelled, stderr_console, with_prefix
from ..recipe import Recipe, adapter_config, load_resolved, to_yaml
from ..recipe.model import QUANTIZATION_RECORD
from ..run.folder import RunFolder
from ..run.record import to_text
from ..tasks import TASKS
from .card import card, pictures, public, public_record

CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "adapter_config.json",
)
MODEL_NAMES = ("name_or_path", "_name_or_path", "base_model_name_or_path")
"""Their keys whose value is a model's name, or its folder."""
UPLOADED = (
    *CONFIG_FILES,
    *("*.safetensors", "*.safetensors.index.json", QUANTIZATION_RECORD),
    *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *(
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
    ),
)
"""Names of weights, configurations and tokenizers, as transformers and PEFT write them. Not pickles
(.bin, .pt, .pkl), which can run code when they are loaded."""


def push(
    path: str,
    repo: str,
    *,
    merged: bool = False,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
) -> str:
    """Upload the run's model, or its merged model, in one commit; return its page on the hub.

    dry_run: upload nothing, use no network, and return the list of files. Raises UserError, before
    anything is uploaded, if the model should not or cannot be uploaded.
    """
    # Everything that can fail without the network is checked before anything is uploaded.
    if repo.count("/") != 1:
        raise UserError(
            f"{repo}: is no OWNER/NAME; write a user or an organization of the hub, a slash and a"
            " name"
        )
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise UserError(str(error)) from None
    run = RunFolder(path)
    # A push writes nothing into it: where no lock can be written, no training can write either.
    locked = run.locked() if os.access(run.path, os.W_OK) else nullcontext()
    with locked, tempfile.TemporaryDirectory() as name:
        model, folder, recipe = _model_of(run, merged), Path(name), load_resolved(run.recipe)
        if not dry_run and constants.HF_HUB_OFFLINE:
            raise UserError("HF_HUB_OFFLINE is set, but a push needs the hub; unset HF_HUB_OFFLINE")
        if not dry_run and get_token() is None:
            raise UserError(
                "there is no token for the Hugging Face hub; run `hf auth login`, or set HF_TOKEN"
            )
        try:
            # One commit of links and rewritten files: the run's own folder stays as it is.
            _stage(folder, run, recipe, model, repo, merged, revision)
            if dry_run:
                sizes = [
                    (with_prefix(file.stat().st_size, "B"), file.name)
                    for file in sorted(folder.iterdir())
                ]
                return "\n".join(
                    [f"{repo} would receive", *(f"{size:>10}  {name}" for size, name in sizes)]
                )
            api = HfApi()
            api.create_repo(repo, private=private or None, exist_ok=True)
            # exist_ok does not change an existing repository
            if private and not api.model_info(repo).private:
                raise UserError(
                    f"{repo}: exists already and is public; choose another name, or remove"
                    " --private"
                )
            if revision:
                api.create_branch(repo, branch=revision, exist_ok=True)
            message = f"{TASKS[recipe.task].title} with {recipe.optimizer.name}, by soren-align"
            # One commit: the repository never has a model without its card.
            api.upload_folder(
                repo_id=repo, folder_path=folder, revision=revision, commit_message=message
            )
        except (HTTPError, OSError) as error:  # the hub's errors are of both types
            reason = in_one_line(error, 400)
            raise UserError(
                f"{repo}: the upload failed: {reason}; check the token, the name and the network"
            ) from error
    return f"{constants.ENDPOINT}/{repo}" + (f"/tree/{revision}" if revision else "")


def _stage(
    folder: Path,
    run: RunFolder,
    recipe: Recipe,
    model: Path,
    repo: str,
    merged: bool,
    revision: str | None,
) -> None:
    """Fill `folder` with the repository's files: links to the model's, then card, its pictures,
    recipe and run.json.

    Other files of the model's folder are printed.
    """
    left_out, shown = [], pictures(run)
    # By an allowlist: notes, optimizer states and pickles beside the weights stay here.
    for file in sorted(model.iterdir()):
        if not any(fnmatchcase(file.name, name) for name in UPLOADED):
            # The card is written anew.
            left_out += [file.name] if file.name not in ("README.md", *shown) else []
        elif file.is_symlink():
            raise UserError(
                f"{file}: is a symbolic link, whose target may not belong to the model; replace the"
                " link by the file"
            )
        elif file.is_file():
            # Libraries write the folder that they loaded a model from. Tokens and other values may
            # look like paths.
            config = read_json(file) if file.name in CONFIG_FILES else None
            config = config if isinstance(config, dict) else {}
            names = {key: public(value) for key, value in config.items() if key in MODEL_NAMES}
            if config | names != config:
                (folder / file.name).write_text(
                    json.dumps(config | names, indent=2) + "\n", encoding="utf-8"
                )
            else:
                (folder / file.name).symlink_to(file.resolve())
    if left_out:
        print_labelled(
            stderr_console(),
            "left out",
            f"files that are not part of a model: {', '.join(left_out)}",
        )
    for name, picture in shown.items():
        (folder / name).write_bytes(picture.read_bytes())
    # Written last and from the run: what an earlier command, or a person, has written into the
    # model's folder is not uploaded as the card.
    page = card(run, repo.partition("/")[2], merged, repo=repo, revision=revision)
    (folder / "README.md").write_text(page, encoding="utf-8")
    (folder / "recipe.yaml").write_text(to_yaml(public(recipe.model_dump())), encoding="utf-8")
    record = public_record(run.record(), recipe)
    (folder / "run.json").write_text(to_text(record), encoding="utf-8")


def _model_of(run: RunFolder, merged: bool) -> Path:
    """Return the folder to upload.
    Raises UserError if it is missing, or useless on another machine.
    """
    record = run.record()
    if record["status"] == "diverged":
        raise UserError(f"{run}: {run.why_no_model()}")
    if record["status"] != "finished":
        raise UserError(
            f"{run}: the run is not finished (status: {record['status']}); rerun the run's command,"
            " with --no-eval to skip the evaluation"
        )
    if (run.merged if merged else run.model).is_symlink():
        raise UserError(
            f"{run.merged if merged else run.model}: is a symbolic link; replace the link by the"
            " folder"
        )
    if not any(run.model.glob("*.safetensors")):
        raise UserError(
            f"{run}: has no model, because {run.model} contains no .safetensors file; train again"
            " with --overwrite"
        )
    adapter = adapter_config(run.model)
    if merged and adapter is None:
        raise UserError(
            f"{run}: trained all weights, so it has no adapter to merge; remove --merged"
        )
    if merged:
        if not run.is_merged():
            raise UserError(
                f"{run.merged}: was not merged from this run's adapter; run `soren-align merge"
                f" {run}` first"
            )
        return run.merged
    if adapter and Path(adapter["base_model_name_or_path"]).is_absolute():
        remedy = (
            f"Merge the adapter with `soren-align merge {run}`, and push the merged model with"
            " --merged"
        )
        if run.is_merged():
            remedy = f"Push the merged model {run.merged} with --merged"
        raise UserError(
            f"{run}: the base model is a folder on this machine, which other users do not have."
            f" {remedy}"
        )
    return run.model
