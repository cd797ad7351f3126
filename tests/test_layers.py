"""The rules of the house. Each is a function from a package's folder to its violations, tried on a planted one too."""

import ast
import re
import traceback
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from soren_align.optim import SpectralOptimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support import command

PACKAGE = Path(__file__).resolve().parent.parent / "soren_align"
# A room imports from rooms below its own layer only.
LAYERS = [{"cli"}, {"study", "doctor"}, {"launch"}, {"planning", "publish"},
          {"training", "evaluate", "plugins"}, {"sharding", "data"}, {"run", "importers"},
          {"optim", "recipe", "testing"}, {"spectral", "tasks"}, {"core"}]  # fmt: skip
# The rooms that may import each of these dependencies.
DOORS = {"deepspeed": {"sharding", "launch"}, "torch.distributed": {"sharding", "launch", "doctor"},
         "trl": {"training", "recipe"}, "datasets": {"data", "evaluate"}, "lm_eval": {"evaluate"}}  # fmt: skip
HEAVY = {"torch", "transformers", "trl", "datasets", "accelerate", "peft", "lm_eval", "deepspeed"}
# Rooms, and files of rooms, that are imported before torch.
WITHOUT_TORCH = {"cli", "study", "publish/card.py", "publish/push.py", "importers", "recipe", "tasks", "core"}
WITHOUT_TORCH |= {f"evaluate/answers/{name}.py" for name in ("comparison", "files")}
WITHOUT_TORCH |= {f"evaluate/stats/{name}.py" for name in ("intervals", "paired", "points", "power", "significance")}
WITHOUT_TORCH |= {"run/folder.py", "run/lock.py", "run/record.py", "run/provenance.py", "run/metrics.py"}
OTHER_VERSIONS = {("recipe/trl.py", "trl")}  # read where another TRL than trl.json's is installed


def files(package):
    return sorted(package.rglob("*.py"))


def room(file, package):
    return file.relative_to(package).parts[0].removesuffix(".py")


def layer(name):
    return next((number for number, names in enumerate(LAYERS) if name in names), None)


def imports(file, package, walk=ast.walk):
    """Absolute names of all that a file imports: in functions and for type checkers too, unless `walk` leaves them out."""
    parents = ["soren_align", *file.relative_to(package).parts[:-1]]
    names = set()
    for node in walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names |= {prefix, *(f"{prefix}.{alias.name}" for alias in node.names)}
    return names


def import_graph(package):
    """For each file the files of the package that it imports; a package's own __init__ only where it is named."""
    by_name = {}
    for file in files(package):
        parts = file.relative_to(package).with_suffix("").parts
        by_name[".".join(["soren_align", *(parts[:-1] if parts[-1] == "__init__" else parts)])] = file
    graph = {}
    for file in files(package):
        names = imports(file, package)
        # `from .room import module` names the room too, and needs only the module.
        modules = {name for name in names if name in by_name}
        needless = {name for name in modules if all(f"{name}.{leaf}" in by_name for leaf in _leaves(names, name))}
        graph[file] = {by_name[name] for name in modules - needless} - {file}
    return graph


def _leaves(names, module):
    leaves = {name.removeprefix(module + ".") for name in names if name.startswith(module + ".")}
    return {leaf for leaf in leaves if "." not in leaf} or {"itself"}


def upward_arrows(package):
    for file in files(package):
        here = room(file, package)
        if here in ("__init__", "__main__"):
            continue
        if layer(here) is None:
            yield f"{here} has no layer"
            continue
        for there in sorted({name.split(".")[1] for name in imports(file, package) if name.startswith("soren_align.")}):
            if there != here and layer(there) is not None and layer(there) <= layer(here):
                yield f"{file.name} of {here} imports {there}, which is not below it"


def wrong_doors(package):
    for file in files(package):
        here = room(file, package)
        for name in sorted(imports(file, package)):
            for dependency, doors in DOORS.items():
                if (name == dependency or name.startswith(dependency + ".")) and here not in doors:
                    yield f"{file.name} of {here} imports {name}; its doors are {sorted(doors)}"
            if (str(file.relative_to(package)), name) in OTHER_VERSIONS:
                continue
            if {here, str(file.relative_to(package))} & WITHOUT_TORCH and name.split(".")[0] in HEAVY:
                yield f"{file.name} of {here} imports {name}, and must be quick to import"


def second_tier(package):
    """Imports of research and benchmarks, which are in no wheel."""
    for file in files(package):
        if names := {name.split(".")[0] for name in imports(file, package)} & {"research", "benchmarks"}:
            yield f"{file.name} of {room(file, package)} imports {sorted(names)}"


# What an optimizer must not know of: where tensors lie, and who trains.
STRANGERS = re.compile(r"\b(rank|ddp|fsdp2?|zero\d?|deepspeed|transformers|trl|accelerate|launcher)\b", re.IGNORECASE)


def strangers_in_the_optimizer(package):
    """Names of ranks, sharding and trainers in the code of optim/optimizer.py, docstrings and comments aside; and every
    place but one that reads DeepSpeed's shape of a whole parameter."""
    for file in files(package):
        tree = ast.parse(file.read_text())
        if file.relative_to(package).as_posix() == "optim/optimizer.py":
            identifiers = {getattr(node, field) for node in ast.walk(tree) for field in ("id", "attr", "arg", "module")
                           if isinstance(getattr(node, field, None), str)}  # fmt: skip
            for name in sorted(identifiers | imports(file, package)):
                if STRANGERS.search(name.replace("_", " ").replace(".", " ")):
                    yield f"{file.name} knows of {name}"
        reads = [
            node for node in ast.walk(tree) if "ds_shape" in (getattr(node, "value", ""), getattr(node, "attr", ""))
        ]
        if reads and file.relative_to(package).as_posix() != "optim/layout.py":
            yield f"{file.name} of {room(file, package)} reads ds_shape; call optim.layout.whole_shape"


def import_circles(package):
    try:
        TopologicalSorter(import_graph(package)).prepare()
    except CycleError as error:
        yield " -> ".join(str(file.relative_to(package)) for file in error.args[1])


def changed_libraries(package):
    """Changes to other libraries outside core/patches.py: `module.name = ...`, setattr(module, ...), unittest.mock."""
    for file in files(package):
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if any(name.startswith("unittest") for name in imports(file, package)):
            yield f"{file.name} of {room(file, package)} imports unittest"
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                targets = node.args[:1] if isinstance(node.args[0], ast.Attribute | ast.Name) else []
            for target in targets:
                owner = target if isinstance(node, ast.Call) else getattr(target, "value", None)
                while isinstance(owner, ast.Attribute):
                    owner = owner.value
                if isinstance(target, ast.Attribute | ast.Name) and isinstance(owner, ast.Name) and owner.id in names:
                    yield f"{file.name} of {room(file, package)} changes {ast.unparse(target)}; see core/patches.py"


RULES = {
    upward_arrows: {"optim/planted.py": "def f():\n    from ..training import run\n"},
    wrong_doors: {"data/planted.py": "import lm_eval.tasks as tasks\n"},
    second_tier: {"optim/planted.py": "def f():\n    from research.nulls import RANDOM\n"},
    strangers_in_the_optimizer: {"optim/optimizer.py": "def step(x):\n    return x.zero_strategy\n"},
    import_circles: {"optim/one.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .two import f\n",
                     "optim/two.py": "from . import one\n"},
    changed_libraries: {"data/planted.py": "import os\nfrom datasets import config\nconfig.HF_HUB_OFFLINE = True\n"},
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule):
    assert list(rule(PACKAGE)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_planted_violation_is_found(rule, tmp_path):
    for name, source in RULES[rule].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    assert len(list(rule(tmp_path))) == 1


def test_a_room_of_another_package_is_no_arrow(tmp_path):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "planted.py").write_text("from torch.optim import AdamW\nfrom . import update\n")
    assert list(upward_arrows(tmp_path)) == []


@pytest.mark.model
def test_a_command_reaches_the_optimizers_step_in_five_files(tmp_path):
    """As a person finds them in a traceback."""
    stacks = []

    def record(optimizer, *_):
        if isinstance(optimizer, SpectralOptimizer):  # and not the one that the schedule is tried on
            stacks.append(traceback.extract_stack())

    hook = register_optimizer_step_pre_hook(record)
    short = command.overrides("trainer.max_steps=1", "trainer.warmup_steps=0", f"run.output_dir={tmp_path}")
    try:
        assert command.run("sft", "quickstart/sft", "--no-eval", *short).returncode == 0
    finally:
        hook.remove()
    files_of_stack = [Path(frame.filename) for frame in stacks[0]]
    ours = dict.fromkeys(str(file.relative_to(PACKAGE)) for file in files_of_stack if file.is_relative_to(PACKAGE))
    assert list(ours) == ["cli/app.py", "launch/commands.py", "training/run.py", "training/trainer.py"]
