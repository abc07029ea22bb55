"""The notebooks match their sources, install without changing JAX, and run."""

import ast
import importlib.metadata
import importlib.util
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from helpers.snippets import ROOT, load_file
from nbclient import NotebookClient

FOLDER = ROOT / "notebooks"
URL = "https://github.com/owner/rampup"
# Output that shows that a notebook demonstrates what it is about.
PRINTS = {
    "quickstart": [
        "programs compiled: 4\n",
        "programs compiled: 1\n",
        "losses equal bit for bit: True\n",
    ],
    "pipeline": [
        "found 8 device(s): CPU",
        "2 replica(s) of 4 stage(s)",
        "compiled 1\n",
        "27.3%",
        "m = 32, b =  2, 9% idle",
    ],
    "batch_sizes_explained": [
        "found 1 device(s): CPU",
        "nearest: 16, 32\n",
        "packed: 15.0%",
        "fits: 2\n",
    ],
    "rl": [
        "learned: True\n",
        "better than before: True\n",
        "{'generate': 1, 'logprobs': 1, 'update': 1}\n",
        "chips used: 1 of ",
        "         0.1     82%     66%     43%     19%\n",
        "noise scale: ",
    ],
    "fine_tuning": [
        "the loss is a sum over the rows that were tried",
        " rows fit, ",
        "noise scale ",
        "every step once: True\n",
        "learned: True\n",
    ],
    "minigpt": [
        "found 8 device(s): CPU",
        "plain step compiled for [8, 16, 32, 64]\n",
        "programs compiled: 1\n",
        "learned: True\n",
        "same run: True\n",
    ],
}


make = load_file("notebooks/make.py")


def texts(name):
    """Return the text of the two files of a notebook."""
    return (FOLDER / f"{name}.py").read_text(), (FOLDER / f"{name}.ipynb").read_text()


@pytest.mark.parametrize("name", make.NAMES)
def test_files_are_in_sync(name):
    """Both files equal what notebooks/make.py makes from the .py and pyproject.toml,
    without outputs.
    """
    url = make.repository((ROOT / "pyproject.toml").read_text())
    py, ipynb = texts(name)
    assert make.make_notebook(py, name, url) == (py, ipynb)
    code = [cell for cell in nbformat.reads(ipynb, 4).cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_every_notebook_is_made_and_named():
    """The folder contains exactly the notebooks that are made, and the page of
    tutorials has each.
    """
    assert (
        {path.stem for path in FOLDER.glob("*.ipynb")} == set(make.NAMES) == set(PRINTS)
    )
    assert all(
        f"{{doc}}`{name}`" in (ROOT / "docs/tutorials/index.md").read_text()
        for name in make.NAMES
    )


def test_badge_and_install_follow_the_address():
    """An address gives a badge as the first cell and an install from there; without it
    both are as before.
    """
    py, ipynb = texts("pipeline")
    with_url, notebook = make.make_notebook(py, "pipeline", URL)
    first, _, install, *_ = nbformat.reads(notebook, 4).cells
    assert (
        "(https://colab.research.google.com/github/owner/rampup/blob/main/notebooks/pipeline.ipynb)"
        in first.source
    )
    assert f'"rampup[plot] @ git+{URL}"' in install.source
    assert make.make_notebook(with_url, "pipeline", URL) == (with_url, notebook)
    assert make.make_notebook(
        with_url, "pipeline", make.repository((ROOT / "pyproject.toml").read_text())
    ) == (py, ipynb)


def test_address_is_read_from_the_project_and_badge_needs_github():
    """It is `Repository` in project.urls, if any; every spelling at GitHub gives the
    same badge, and Colab opens no others.
    """
    assert (
        make.repository(
            f'[project]\nname = "a"\n[project.urls]\nRepository = "{URL}"\n'
        )
        == URL
    )
    assert (
        make.repository(
            '[project]\nname = "a"\n[project.urls]\nHomepage = "https://b"\n'
        )
        is None
    )
    assert make.repository('[project]\nname = "a"\n') is None
    assert (
        len(
            {make.badge_cell(url, "pipeline") for url in (URL, f"{URL}/", f"{URL}.git")}
        )
        == 1
    )
    others = (
        None,
        "https://gitlab.com/owner/rampup",
        "https://github.com/owner",
        "github.com/owner/rampup",
    )
    assert [make.badge_cell(url, "pipeline") for url in others] == [None] * 4


def install(monkeypatch, url, packages):
    """Run the install cell on a machine with these packages and return the arguments of
    each `%pip`.
    """
    found = [
        SimpleNamespace(name=name, version=version)
        for name, version in packages.items()
    ]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    source = re.sub(r"%pip (.*)", r"ran.append(f'\1')", make.install_cell(url))
    ran = []
    exec(source, {"ran": ran})
    return ran


def test_install_keeps_the_machines_jax(monkeypatch, tmp_path):
    """Pip keeps the installed versions of jax, jaxlib, its plugins and libtpu, and no
    others.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    packages = {
        "jax": "0.7.2",
        "jaxlib": "0.7.2",
        "jax-cuda12-plugin": "0.7.2",
        "libtpu": "0.0.21.1",
        "numpy": "2.0",
    }
    (command,) = install(monkeypatch, URL, packages)
    constraints = re.fullmatch(
        r'install -q -c (\S+) "rampup\[plot\] @ git\+' + URL + '"', command
    )[1]
    kept = [
        "jax==0.7.2",
        "jaxlib==0.7.2",
        "jax-cuda12-plugin==0.7.2",
        "libtpu==0.0.21.1",
    ]
    assert Path(constraints).read_text().splitlines() == kept


def test_install_from_the_clone(monkeypatch, tmp_path):
    """Without an address, the cell installs the repository that is here, above or one
    folder below, or else a wheel; without any it fails. With rampup, pip does not run.
    """
    monkeypatch.chdir(FOLDER)
    (command,) = install(monkeypatch, None, {})
    assert command.endswith(f'"{ROOT.resolve()}[plot]"')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RuntimeError, match="rampup is not installed; copy its repository"
    ):
        install(monkeypatch, None, {})
    wheel = tmp_path / "rampup-0.1.0-py3-none-any.whl"
    wheel.touch()
    (command,) = install(monkeypatch, None, {})
    assert command.endswith(f'"{wheel}[plot]"')
    (tmp_path / "copy" / "rampup" / "plan").mkdir(parents=True)
    (command,) = install(monkeypatch, None, {})
    assert command.endswith(f'"{tmp_path / "copy"}[plot]"')
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "rampup" / "plan").mkdir(parents=True)
    (command,) = install(monkeypatch, None, {})
    assert command.endswith(f'"{tmp_path}[plot]"')
    assert (
        install(monkeypatch, None, {"rampup": "0.1.0"})
        == install(monkeypatch, URL, {"rampup": "0.1.0"})
        == []
    )


@pytest.mark.notebooks
@pytest.mark.parametrize("name", make.NAMES)
def test_notebook_runs(name, monkeypatch, tmp_path):
    """Every cell runs on a CPU, in a folder above the repository as in Colab, and the
    output shows what the notebook is about. The site runs them in their own folder.
    """
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (tmp_path / "rampup").symlink_to(ROOT)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    printed = "".join(
        output.text for output in outputs if output.get("name") == "stdout"
    )
    assert [text for text in PRINTS[name] if text not in printed] == []
    draws = "matplotlib" in texts(name)[0]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures >= 3 or not draws


@pytest.mark.tpu_compile
def test_quickstart_compiles_for_the_chip_of_colab():
    """Its steps compile for v5e:1x1: a program for each batch size, one for
    microbatches, and one of each `train_step`.
    """
    pytest.importorskip("libtpu")
    import jax
    import numpy as np

    import rampup
    from rampup.contrib.lab.topology import compile_for, topology_devices
    from rampup.engine.mesh import make_mesh, replicated

    _, *cells = [
        cell.source
        for cell in nbformat.read(FOLDER / "quickstart.ipynb", 4).cells
        if cell.cell_type == "code"
    ]
    found = {"__name__": "quickstart"}
    for cell in cells:
        # What it defines, but no training.
        trains = "curves" in found
        for node in ast.parse(re.sub(r"(?m)^%.*", "", cell)).body:
            if not trains or isinstance(
                node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
            ):
                exec(compile(ast.Module([node], []), "quickstart", "exec"), found)
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.linear(
            start=8, increment=8, end=32, samples=found["RAMP_SAMPLES_PER_DEVICE"]
        ),
        splitter=rampup.BatchSplitter(data_parallel_size=1),
        num_devices=1,
        total_steps=found["STEPS"],
    )
    mesh, tx = (
        make_mesh(devices=topology_devices("v5e:1x1")),
        found["optax"].adam(0.005),
    )

    def place(tree):
        sharding = replicated(mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                np.shape(x), jax.numpy.result_type(x), sharding=sharding
            ),
            tree,
        )

    def state(tx):
        return found["TrainState"].create(
            apply_fn=found["net"].apply, params=found["params"], tx=tx
        )

    found["tx"], lowered = tx, []
    for optimizer, sizes in (
        (tx, (8, 16, 24, 32)),
        (rampup.multi_steps(tx, plan), (8,)),
    ):
        for size in sizes:
            batch = {
                "x": np.zeros((size, 2), np.float32),
                "y": np.zeros(size, np.int32),
            }
            lowered.append(
                found["make_step"]().lower(place(state(optimizer)), place(batch))
            )
    nnx_state, nnx_loss = rampup.split_model(
        found["NnxNet"](found["nnx"].Rngs(0)), found["loss_fn"], tx, rampup.make_mesh()
    )
    for start, loss in ((state(tx), found["linen_loss_fn"]), (nnx_state, nnx_loss)):
        step = rampup.train_step(loss, tx, plan, mesh)
        lowered.append(step.lower(place(start), found["rows"][0], plan.splits[-1]))
    assert plan.num_compiled_shapes == 1
    for program in lowered:
        assert compile_for(program).memory_analysis().argument_size_in_bytes > 0
