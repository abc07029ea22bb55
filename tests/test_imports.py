"""The architecture, read from the imports."""

import ast
import graphlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny import TINY, command_line

import rampup

PACKAGE = Path(__file__).parent.parent / "rampup"
FLOORS = (
    "errors < plan < config < engine < data < checks < loop < lm < show < cli < contrib"
)
# The only imports that point up, inside methods of the step: what they return
# is made by `rampup.data`, and step 0 asks the checks about its loss.
UPWARD = {
    ("engine/step.py", "rampup.data.batches"),
    ("engine/evaluation.py", "rampup.data.batches"),
    ("engine/step.py", "rampup.data.fields"),
    ("engine/step.py", "rampup.checks.loss"),
    ("engine/evaluation.py", "rampup.checks.loss"),
}
PURE = ("errors", "plan", "config")
IMPURE = {
    "jax",
    "flax",
    "optax",
    "grain",
    "orbax",
    "numpy",
    "time",
    "datetime",
    "logging",
    "random",
}
RANK = {
    name: rank
    for rank, names in enumerate(f"{FLOORS} < __main__".split("<"))
    for name in names.split()
}
MODULES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.parent != PACKAGE or path.stem != "__init__"
)


def imported(path):
    """Yield every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_point_down(path):
    """A room imports from those to its left in `FLOORS`, and from itself. Plan and
    configuration import no jax and no clock.
    """
    file = path.relative_to(PACKAGE)
    own = file.parts[0].removesuffix(".py")
    for name in imported(path):
        if name.startswith("rampup.") and (str(file), name) not in UPWARD:
            other = name.split(".")[1]
            assert other == own or RANK[other] < RANK[own], f"{own} imports {name}"
        assert own not in PURE or name.split(".")[0] not in IMPURE, (
            f"{own} imports {name}"
        )


@pytest.mark.core
def test_imports_have_no_cycle():
    """No module imports, at its top level, a module that imports it."""
    parts = {
        path: path.relative_to(PACKAGE.parent).with_suffix("").parts
        for path in PACKAGE.rglob("*.py")
    }
    names = {
        ".".join(own[:-1] if own[-1] == "__init__" else own): path
        for path, own in parts.items()
    }
    graph = {}
    for name, path in names.items():
        targets = set()
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("rampup")
            ):
                targets |= {
                    node.module,
                    *(f"{node.module}.{alias.name}" for alias in node.names),
                }
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        graph[name] = (targets & set(names)) - {name}
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.core
def test_import_rampup_imports_no_jax():
    """A plan and a check import no jax, and a legal plan no refusals; `train_step`
    imports nothing that reads data.
    """
    code = """
import sys, rampup
rampup.build_plan(rampup.Config(), 1), rampup.contrib.check.check_file, rampup.contrib.rl.RolloutPlan, rampup.plan.Timetable
assert "jax" not in sys.modules and "numpy" not in sys.modules and "rampup.config.refusal" not in sys.modules
rampup.train_step
assert "jax" in sys.modules and "rampup.data.batches" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("module", "others"),
    [
        (
            "plan",
            (
                "jax",
                *(
                    f"rampup.{name}"
                    for name in rampup._MODULES
                    if name not in ("plan", "errors")
                ),
            ),
        ),
        ("cli.plan", ("jax", "rampup.contrib.rl", "rampup.lm", "rampup.contrib.check")),
        (
            "engine.step",
            (
                "rampup.plan.topology",
                *(
                    f"rampup.{name}"
                    for name in FLOORS.split()
                    if RANK.get(name, 0) > RANK["engine"]
                ),
            ),
        ),
    ],
)
def test_a_room_does_not_load_those_above_it(module, others):
    """`import rampup.plan` loads neither jax nor another room, and the compiled step no
    room above it and no table of TPUs.
    """
    code = (
        f"import sys, rampup.{module}; print([name for name in sys.modules if"
        f" name.startswith({others!r})])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        == "[]\n"
    )


GUEST = """
import importlib.util, logging, os, pathlib, signal, sys, threading, warnings
import flax.nnx, grain, jax, numpy as np, optax, orbax.checkpoint

def globals_of_the_process():
    loggers = {"": logging.root} | {name: one for name, one in logging.root.manager.loggerDict.items() if hasattr(one, "level")}
    return {
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, list(sys.meta_path)),
        "warnings": list(warnings.filters),
        "loggers": {name: one.level for name, one in loggers.items() if one.level},
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "constraint": jax.lax.with_sharding_constraint,
    }

def check(what):
    after = globals_of_the_process()
    assert after == before, (what, [name for name in before if after[name] != before[name]])

signal.signal(signal.SIGTERM, lambda number, frame: None)
before = globals_of_the_process()
import rampup
[getattr(rampup, name) for name in rampup.__all__]
check("import")

ramp = rampup.BatchRamp.from_schedule("0:2 8:4")
plan = rampup.RampPlan(ramp=ramp, splitter=rampup.BatchSplitter(data_parallel_size=1), num_devices=1, total_steps=6)
mesh, tx = rampup.make_mesh(), optax.sgd(0.1)

def loss_fn(params, batch, rngs):
    x = jax.lax.with_sharding_constraint(batch["x"], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    return ((x @ params - 1) ** 2).sum(), x.shape[0], {}

rows = [{"x": np.ones(3, np.float32)} for _ in range(32)]
batches = lambda start: rampup.step_batches(rows, plan, mesh, start=start, seed=0)
step, state = rampup.train_step(loss_fn, tx, plan, mesh), rampup.create_state(jax.numpy.zeros(3), tx, mesh)
for number, batch in zip(range(3), batches(0)):
    state, _ = step(state, batch)
check("train_step")

state, folder = rampup.create_state(jax.numpy.zeros(3), tx, mesh), pathlib.Path(sys.argv[1])
options = rampup.CheckpointOptions(checkpoint_period=3, identity={})
rampup.Loop(plan=plan, step=step, batches=batches, folder=folder, checkpoints=options).run(state)
check("Loop")
assert rampup.load(folder).step == 6
check("load")
if importlib.util.find_spec("libtpu"):
    rampup.contrib.lab.topology_devices("v5e:1x1")
    check("topology_devices")
"""


@pytest.mark.slow
def test_training_on_text_loads_no_reinforcement_learning(tmp_path):
    """`rampup train base.yml` trains without a module of `contrib`."""
    settings = command_line(TINY | {"steps": 1, "base_output_directory": tmp_path})
    code = f"""
import sys
from rampup.cli import main
assert main(["train", "base", *{list(map(str, settings))!r}]) == 0
print([name for name in sys.modules if name.startswith("rampup.contrib.")])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_process_of_the_caller_stays_as_it_is(tmp_path):
    """No import, step, run or load changes hooks, warnings, loggers, the environment,
    signal handlers or JAX.
    """
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", GUEST, tmp_path / "run"],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.core
def test_public_names_are_found_and_documented():
    """Every import that editors see is a public name, in `dir(rampup)`, and
    documented.
    """
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    listed = {alias.name: node.module for node in block.body for alias in node.names}
    assert listed == rampup._HOME
    assert set(rampup.__all__) <= set(dir(rampup))
    assert all(getattr(rampup, name).__doc__ for name in rampup.__all__)


# Keywords that are the user's own: the fields of a state, and the keys of a
# configuration.
OWN_KEYWORDS = {"TrainState.replace"}


def test_public_signatures_name_their_keywords():
    """No public function or method takes `**options`, which neither an editor nor
    `help` can show.
    """
    found = set()
    for name in rampup.__all__:
        thing = getattr(rampup, name)
        public = {name: thing} if callable(thing) else {}
        if inspect.isclass(thing):
            methods = {
                method: getattr(thing, method)
                for method in dir(thing)
                if not method.startswith("_")
            }
            public |= {
                f"{name}.{method}": value
                for method, value in methods.items()
                if callable(value)
            }
        for place, value in public.items():
            if isinstance(value, type(BaseException.add_note)) or (
                inspect.isclass(value) and issubclass(value, Warning)
            ):
                continue  # written in C, some without a signature
            kinds = {
                parameter.kind
                for parameter in inspect.signature(value).parameters.values()
            }
            found |= {place} if inspect.Parameter.VAR_KEYWORD in kinds else set()
    assert found == OWN_KEYWORDS
