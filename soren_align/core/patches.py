"""All changes of other libraries at run time, each with its reason and its end.

A change lasts as long as a `with` block, and takes effect in the whole process: the block is around
the one call that needs it. What a library offers as a setting (an environment variable, a subclass,
torch's `add_safe_globals`) is no change of this kind. tests/test_layers.py finds changes elsewhere;
tests/test_patches.py finds names that a new version of a library no longer has.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Patch:
    """Why a name of another library is replaced."""

    reason: str
    until: str
    """The change upstream that ends it; versions are those for which it was last checked."""
    issue: str = "no issue found"
    """The upstream thread."""


PATCHES = {
    "lm_eval.tasks._yaml_loader._import_func_in_yml": Patch(
        "`!function` in a task file imports and runs the module beside it; a suite from elsewhere"
        " is data",
        "lm-eval asks before it runs a task's module (0.4.13 does not)",
        "https://github.com/EleutherAI/lm-evaluation-harness/issues/1135",
    ),
    "lm_eval.api.task.get_metric": Patch(
        "an unknown metric is downloaded by the package `evaluate` and run as a script",
        "lm-eval asks before it runs a metric's script (0.4.13 does not)",
        "https://github.com/EleutherAI/lm-evaluation-harness/issues/1135",
    ),
    "datasets.load_dataset": Patch(
        "lm-eval passes all of a task's dataset_path and dataset_kwargs on: any loader, and any"
        " folder to write to",
        "lm-eval restricts dataset_kwargs (0.4.13 does not)",
        "https://github.com/EleutherAI/lm-evaluation-harness/issues/1135",
    ),
    "pyarrow.json.read_json": Patch(
        "a column of texts that are all dates becomes one of timestamps, printed with a time: the"
        " right answer 2004-10-20 would be 2004-10-20 00:00:00",
        "`datasets` keeps texts (5.2 does not: it has no option for it)",
    ),
    "lm_eval.utils.env": Patch(
        "templates of tasks are rendered outside of Jinja's sandbox",
        "lm-eval renders in a sandbox (0.4.13 does not)",
    ),
    "lm_eval.evaluator.get_git_commit_hash": Patch(
        "starts git at each evaluation, which prints an error outside of a repository; the result"
        " is not used",
        "simple_evaluate has an option without it (0.4.13 has none)",
        "https://github.com/EleutherAI/lm-evaluation-harness/issues/2625",
    ),
    "langdetect.DetectorFactory.seed": Patch(
        "IFEval's check of a response's language draws n-grams from a generator without a seed:"
        " scores would vary",
        "lm-eval sets it (0.4.13 does not)",
    ),
    "lm_eval.evaluator.add_env_info": Patch(
        "starts a dozen programs to describe the machine at each evaluation; the result is not"
        " used",
        "simple_evaluate has an option without it (0.4.13 has none)",
    ),
    "huggingface_hub.constants.HF_HUB_OFFLINE": Patch(
        "offline mode is read from the environment once, at the import",
        "huggingface_hub has a context manager for offline mode (2.4 reads it only:"
        " is_offline_mode)",
        "https://github.com/huggingface/huggingface_hub/pull/3593",
    ),
    "datasets.config.HF_HUB_OFFLINE": Patch(
        "a copy of huggingface_hub's, made at the import",
        "datasets calls huggingface_hub.is_offline_mode (5.2 does not)",
        "https://github.com/huggingface/datasets/pull/7244",
    ),
    "transformers.integrations.moe._can_use_grouped_mm": Patch(
        "torch's grouped_mm takes fake tensors of bfloat16 only; transformers' own operation has"
        " the same inputs and outputs",
        "torch's grouped_mm takes fake tensors of any dtype (2.13 does not)",
    ),
    "transformers.PreTrainedConfig.attribute_map": Patch(
        "TRL's load-balancing loss reads num_experts, which Llama 4 calls num_local_experts."
        " Another name in the class, and not another value, so that no saved config has it",
        "TRL takes Llama 4's config (1.16 does not)",
        "https://github.com/huggingface/trl/pull/7248",
    ),
    "deepspeed.comm.torch.build_shm_op": Patch(
        "on a CPU it silently compiles, for three minutes, an extension that only inference uses",
        "DeepSpeed builds the extension at its first use (0.19.8 builds it at the start)",
        "https://github.com/deepspeedai/DeepSpeed/issues/7625",
    ),
    "deepspeed.checkpoint.ds_to_universal.os": Patch(
        "it creates a folder per parameter, at a path with the name that the checkpoint contains",
        "DeepSpeed refuses names that lead out of its folder (0.19.8 does not)",
    ),
    "deepspeed.checkpoint.ds_to_universal.dump_param_fragment": Patch(
        "it cannot cut a sparse tensor, as which checkpoints have the second moments of the rows",
        "DeepSpeed converts states of other shapes than the parameter's (0.19.8 does not)",
    ),
    "torch.distributed.checkpoint.save": Patch(
        "accelerate writes FSDP2's shards before it returns; with run.async_save they are copied,"
        " and written while the next steps are taken",
        "accelerate's save_fsdp_model takes torch's async_save (1.15 does not)",
    ),
    "trl.trainer.utils._ChunkedLogProbFunction": Patch(
        "TRL 1.15 has its loss in Triton alone, so that nothing is trained without a GPU",
        "the lower bound of TRL is 1.16, which has a way in torch",
    ),
    **dict.fromkeys(
        ("trl.trainer.dpo_trainer.prepare_fsdp", "trl.trainer.kto_trainer.prepare_fsdp"),
        Patch(
            "TRL shards the reference as one unit, of which each rank would gather all weights for"
            " a forward pass",
            "TRL's prepare_fsdp shards block by block (1.16 only the root)",
        ),
    ),
}
"""The patches by the full name of what they replace; where that is a class's attribute, also in its
subclasses."""


PRIVATE = {
    "transformers.Trainer._get_train_sampler": Patch(
        "torch's global numbers, which group the lengths, differ on ranks and after a resume",
        "LengthGroupedSampler has a seed and an epoch (5.23: a generator that nothing sets)",
        "https://github.com/huggingface/transformers/issues/40691",
    ),
    "transformers.Trainer._run_epoch": Patch(
        "resumed at its last step, or after early stopping, a run would take one more step",
        "transformers compares with max_steps before a step (5.23 only after it)",
    ),
    "transformers.Trainer._get_grad_norm": Patch(
        "the norm that is computed for clipping also bounds the matrices' singular values; a "
        "second one would read all gradients again",
        "on_pre_optimizer_step gets the norm (5.23 passes it to the log alone)",
    ),
    "transformers.Trainer._save_checkpoint": Patch(
        "the seal comes after all files, and old checkpoints go after the seal",
        "on_save comes before the deletion of old checkpoints (5.23 deletes first)",
    ),
    "transformers.Trainer._load_best_model": Patch(
        "the best checkpoint is verified before it becomes the model, and its Kahan compensation "
        "belongs to its weights",
        "a callback comes before the best model is loaded (5.23 has none)",
    ),
    "trl.SFTTrainer._prepare_dataset": Patch(
        "a stream's sequences are complete; to look at the first one would read a block twice",
        "skip_prepare_dataset can be set for the training examples alone (1.16: for all)",
    ),
    "trl.DPOTrainer._prepare_dataset": Patch(
        "pairs are tokens already, and those that max_length cuts to nothing are dropped",
        "DPOTrainer takes tokens, as SFTTrainer does (1.16 takes only texts and messages)",
    ),
    "trl.KTOTrainer._prepare_dataset": Patch(
        "examples are tokens already, and the answers to other prompts are those of a batch of all "
        "ranks: of a rank's own, training would depend on their number",
        "KTOTrainer takes tokens and rotates the answers of all ranks (1.16 does neither)",
    ),
    "trl.DPOTrainer._precompute_ref_logps": Patch(
        "TRL's cache key is that of the weights alone, and under ZeRO 3 the same for all models",
        "TRL's key has the settings and sharded weights (1.16: only the state_dict)",
    ),
    "trl.DPOTrainer._precompute_model_hash": Patch(
        "part of our cache key, and where TRL reads its own", "as _precompute_ref_logps"
    ),
    "trl.DPOTrainer._metrics": Patch(
        "at step 1 the rewards of policy and reference are compared with 0, before the update",
        "compute_loss returns its metrics (1.16: averaged in the next log alone)",
    ),
    "trl.SFTTrainer._total_train_tokens": Patch(
        "the logged num_tokens would begin at 0 after a resume",
        "TRL saves it in the trainer's state (1.16 does not)",
    ),
    "transformers.Trainer._load_optimizer_and_scheduler": Patch(
        "the best checkpoint's Kahan compensation belongs to its weights",
        "transformers loads the optimizer's state with the best model (5.23: the weights alone)",
    ),
    "transformers.Trainer._prepare_inputs": Patch(
        "the loop of pre-training's held-out loss puts a batch on the device as evaluations do",
        "the means of an evaluation are over tokens (5.23: of batches)",
    ),
}
"""Private names of the trainers that training/ overrides, calls or reads: why no public one serves,
and what would end it."""


@contextlib.contextmanager
def patched(name: str, value: Any, owner: Any = None) -> Iterator[Any]:
    """Replace a name of PATCHES within this context; yields its original value.

    owner: the module or class whose attribute it is; None: the one in `name`.
    """
    # No change of another library without a reason that can be read, and an end that can be
    # checked.
    assert name in PATCHES, f"{name} has no entry in PATCHES"
    module, _, attribute = name.rpartition(".")
    owner = import_module(module) if owner is None else owner
    original, is_own = getattr(owner, attribute), attribute in vars(owner)
    setattr(owner, attribute, value)
    try:
        yield original
    finally:
        # An inherited attribute is deleted again: setting it would hide later changes of the base
        # class.
        setattr(owner, attribute, original) if is_own else delattr(owner, attribute)


@contextlib.contextmanager
def hub_offline() -> Iterator[None]:
    """Forbid downloads from the Hugging Face hub within this context."""
    with (
        patched("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        patched("datasets.config.HF_HUB_OFFLINE", True),
    ):
        yield
