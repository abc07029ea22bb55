"""The examples in docs/examples/flax: programs in Flax, each beside its form with a ramp."""

import difflib
import re
import runpy
from pathlib import Path

import pytest
from helpers.snippets import one_device

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
NAMES = ("mnist", "minigpt", "vit", "resnet", "lora")


def lines(name):
    """Return the lines of an example that are not blank, without its docstring."""
    return [line for line in (EXAMPLES / "flax" / f"{name}.py").read_text().splitlines()[1:] if line.strip()]


@pytest.mark.parametrize("name", NAMES)
def test_a_ramp_takes_at_most_12_lines(name):
    """At most 12 lines are new or changed, at most as many fall away, and the page states both numbers."""
    changes = difflib.unified_diff(lines(name), lines(f"{name}_ramp"), lineterm="", n=0)
    signs = [line[0] for line in changes if not line.startswith(("---", "+++", "@@"))]
    new, gone = signs.count("+"), signs.count("-")
    assert max(new, gone) <= 12
    page = (EXAMPLES / "index.md").read_text()
    assert re.search(rf"`{name}_ramp\.py` \|.*\| {new} new or changed, {gone} gone \|", page), (new, gone)


@pytest.mark.notebooks
@pytest.mark.parametrize("name", NAMES)
def test_examples_learn_and_a_ramp_is_one_executable(name):
    """Both forms learn; the one with a ramp compiles its step once."""
    with one_device():
        before, after = (runpy.run_path(str(EXAMPLES / "flax" / f"{name}{end}.py")) for end in ("", "_ramp"))
    for found in (before, after):
        assert found["losses"][-1] < 0.6 * found["losses"][0]
    assert after["plan"].ramp.sizes == (8, 32)
    if "step" in after:
        assert (after["step"].num_compilations, int(after["state"].step)) == (1, 60)
    else:
        assert after["train_step"].jitted_fn._cache_size() == 1
        assert int(after["optimizer"].opt_state.gradient_step[...]) == 60
