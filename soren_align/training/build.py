"""Build the trainer of a checked recipe."""

import contextlib
import hashlib
import io
import json
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers.utils.hub import cached_file, extract_commit_hash
from trl.trainer.utils import add_fused_lm_head

from ..core.errors import as_user_error
from ..optim import build_optimizer
from ..recipe import Recipe, adapter_config, parallel, training_part
from ..run.folder import RunFolder
from ..run.provenance import fingerprint
from ..run.weights import complete_for_trl_, trl_config_names
from ..sharding.ranks import Ranks
from ..tasks import TASKS
from . import adapters, trainer
from .head import needs_plain_loss, plain_forward
from .lost_updates import LostUpdatesPolicy
from .measure.measurements import MeasurementLog
from .model import load_model, save_dtype
from .setup import TrainingSetup, trl_arguments


def build_trainer(
    setup: TrainingSetup,
    folder: RunFolder,
    ranks: Ranks = Ranks(),
    lost_updates: LostUpdatesPolicy | None = None,
):
    """Load the model and return the trainer, an instance of SorenTrainerMixin.

    `trainer.origin` identifies the run in its checkpoints: recipe, processes, data, starting
    weights, template.
    """
    recipe, held_out, task = setup.recipe, setup.tokens.eval, TASKS[setup.recipe.task]
    columns = [*task.token_columns, *task.passed_on]
    args = trl_arguments(recipe, folder.checkpoints, ranks)
    model = load_model(recipe, setup.start)
    if recipe.model.eos_token is not None:
        # One of the end tokens, as SFTTrainer makes its eos_token; DPOTrainer has none.
        token: Any = setup.tokenizer.eos_token_id
        model.config.get_text_config().eos_token_id = token
        generation: Any = model.generation_config
        others = (
            generation.eos_token_id
            if isinstance(generation.eos_token_id, list)
            else [generation.eos_token_id]
        )
        generation.eos_token_id = [
            token,
            *(other for other in others if other not in (None, token)),
        ]
    # Try the optimizer before TRL reads data: an invalid routing ends the run in seconds. With a
    # new adapter the parameters to train exist only after TRL has added it.
    new_adapter = adapters.lora_config(recipe, model)
    if new_adapter is None:
        with as_user_error("optimizer", ValueError):
            build_optimizer(model, **optimizer_settings(recipe))
        if task.has_reference and recipe.model.revision and not isinstance(model, PeftModel):
            # TRL loads the reference by this name, without a revision.
            config_file: Any = cached_file(
                setup.start, "config.json", revision=recipe.model.revision
            )
            model.config._name_or_path = str(Path(config_file).parent)
    kind = parallel(recipe.run.parallel).kind if ranks.launched else None
    # Identify: what must be equal when a run resumes. All of it is compared, since any difference
    # would continue with the optimizer state of another training.
    origin = {
        "training": training_part(recipe),
        "processes": ranks.num_ranks,
        "data": setup.splits.train.source,
        "start": _sha256_or_revision(setup.start, recipe.model.revision),
    }
    if adapter_config(setup.start):
        origin["base"] = _sha256_or_revision(
            *adapters.base_model(setup.start, recipe.model.revision)
        )
    # The recipe names a file, whose contents may have changed.
    template = json.dumps(setup.tokenizer.chat_template)
    origin["chat_template_sha256"] = hashlib.sha256(template.encode()).hexdigest()
    files = (folder.metrics, folder.spectra) if ranks.is_first else (None, None)
    # Construct. TRL prints while it truncates and packs; data/stats.py has already counted and
    # shown the same.
    with (
        as_user_error("trainer", ValueError, RuntimeError),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        return getattr(trainer, task.trainer)(
            model=model,
            args=args,
            train_dataset=(
                setup.stream.dataset if setup.stream else setup.tokens.train.select_columns(columns)
            ),
            eval_dataset=held_out.select_columns(columns) if held_out else None,
            processing_class=setup.tokenizer,
            peft_config=new_adapter,
            optimizer_settings=recipe.optimizer,
            origin=origin,
            measurement_log=MeasurementLog(*files, recipe.run.log_spectra),
            save_dtype=save_dtype(recipe, setup.start),
            parallel=kind,
            lost_updates=lost_updates,
            stream=setup.stream,
        )


def _sha256_or_revision(name: str, revision: str | None) -> str | None:
    """Return the sha256 of a folder's weights; of a model on the hub the commit, which its config
    no longer has (transformers 5.23).
    """
    return fingerprint(name) or extract_commit_hash(
        cached_file(name, "config.json", revision=revision), None
    )


def optimizer_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's optimizer section as keywords of `build_optimizer`, without those that
    are null.
    """
    return recipe.optimizer.model_dump(exclude_none=True)


def trl_forward(model: Any, checkpointing: bool) -> Any:
    """Return a function of token ids [examples, length] that computes the loss as TRL's trainers
    do.

    The model is modified: training mode, no cache, TRL's fused head.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    complete_for_trl_(base)
    add_fused_lm_head(base)
    model.train()
    base.config.use_cache = False
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(tokens: Any) -> Any:
        with trl_config_names(base):
            if needs_plain_loss():
                return plain_forward(base, tokens)
            return model(input_ids=tokens, labels=tokens, fused_lm_head=True)

    return forward
