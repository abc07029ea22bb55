"""All tests run on eight simulated CPU devices and share one compilation cache, also
between worker processes.
"""

import gc
import importlib.util
import os
import re
import signal
import tempfile
from pathlib import Path

if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="rampup-test-cache-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Most of the time goes into compiling programs that run a few steps. The level changes
# no operation, only the machine code.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis
import jax
import pytest

gc.disable()  # until all tests are collected
# A shell that runs the tests in the background makes them ignore Ctrl-C, which some of
# them send.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# A deadline for each example would test how busy the machine is, and so would the time
# that examples take to make.
hypothesis.settings.register_profile(
    "rampup",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("rampup")


@pytest.fixture(scope="module")
def optimized():
    """Compile training steps as users do: at another level, a step with a feature may
    round otherwise than one without it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        yield


@pytest.fixture(scope="module")
def float64():
    """Compute in float64, and forget executables that no other module shares."""
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
    jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def unchecked_losses():
    """Let no training step check its loss by itself, which takes longer than the step;
    see tests/checks/test_loss.py.
    """
    import rampup.checks.loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rampup.checks.loss, "MAX_NUMBERS", -1)
        yield


# Tests with these markers run only if the marker is selected, for instance by `pytest
# -m faults`.
ON_REQUEST = {"bench", "faults", "notebooks", "slow", "tpu_compile"}

# What happens after each fault, with the file that tests it.
FAULTS = Path(__file__).parents[1] / "docs/explanation/fault_tolerance.md"

# Long files come first: with `--dist loadfile`, a long one at the end leaves the other
# workers without work.
FIRST = ("lm", "rl", "engine", "cli", "faults", "loop", "tune")


# What a bare machine and the oldest versions lack. A test that is skipped for another
# reason tests nothing without a word, so it fails where `UNEXPECTED_SKIPS=fail`, as in
# `.ci/run`.
EXPECTED_SKIPS = re.compile(
    r"(MaxText is (not )?installed|needs the package maxtext|Ray is not"
    r" installed|libtpu|the TPU compiler is not installed"
    r"|selenium|Chromium is not installed|mpirun is not|JAX needs mpi4py|are not"
    r" installed \(Debian: slurm"
    r"|Slurm does not start here"
    r"|could not import '(tunix\.|maxtext)|not"
    r" permitted here|network namespaces"
    r"|JAX has no callbacks in a manual function"
    r"|this (version of )?(JAX|Orbax|Optax|Flax) )"
)


def pytest_configure(config):
    """Keep pytest-xdist from starting with the files that have most tests."""
    config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail if a test was skipped for a reason that is not expected."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("UNEXPECTED_SKIPS") != "fail" or reporter is None:
        return
    reasons = {
        str(report.longrepr[2])
        for report in reporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    }
    if unexpected := sorted(
        reason for reason in reasons if not EXPECTED_SKIPS.search(reason)
    ):
        reporter.write_line(
            "skipped for a reason that is not in EXPECTED_SKIPS of tests/conftest.py:"
            f" {unexpected}",
            red=True,
        )
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish():
    """Leave what was imported out of every garbage collection, and collect less often:
    tracing makes many small objects.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(config, items):
    """Sort the tests, and deselect those that run on request only."""
    items.sort(
        key=lambda item: (
            FIRST.index(item.path.parent.name)
            if item.path.parent.name in FIRST
            else len(FIRST)
        )
    )
    selected = {name for name in ON_REQUEST if name in config.option.markexpr}
    if (
        "faults" in selected
    ):  # the whole campaign: also the short tests that the table of faults names
        named = set(re.findall(r"`(tests/\S+\.py)`", FAULTS.read_text()))
        for item in items:
            if str(item.path.relative_to(config.rootpath)) in named:
                item.add_marker("faults")
    kept, deselected = [], []
    for item in items:
        own = {mark.name for mark in item.iter_markers()} & ON_REQUEST
        # Slow tests of another kind run with their kind.
        (kept if (own - {"slow"} or own) <= selected else deselected).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = kept
    if importlib.util.find_spec("libtpu") is None:
        reason = "the TPU compiler is not installed: pip install 'rampup[tpu-compile]'"
        for item in items:
            if item.get_closest_marker("tpu_compile"):
                item.add_marker(pytest.mark.skip(reason=reason))
