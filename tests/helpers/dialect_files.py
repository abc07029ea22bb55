"""Files of other systems: helpers that write and check them."""

import copy
import json
import tempfile
from pathlib import Path

import yaml

from rampup.dialects import check_file

DATA = Path(__file__).parent.parent / "goldens"


def cases(system):
    """Return the reference cases of a system."""
    return json.loads((DATA / f"{system}.json").read_text())


def verdict(system, config, *settings):
    """Write a configuration into a file and check it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yml"
        path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        return check_file(path, system, settings)


def case_settings(case):
    """Return the facts that a case states outside its file, as key=value."""
    found = [f"{key}={case[key]}" for key in ("num_processes", "num_prompts", "dataset_prompts") if key in case]
    return [*found, f"actor_rollout_ref.actor.strategy={case['backend']}"] if "backend" in case else found


def nested(flat):
    """Return dotted keys as nested mappings."""
    result = {}
    for name, value in flat.items():
        result = changed(result, name, value)
    return result


def changed(config, key, value):
    """Return a nested configuration with one dotted key changed."""
    name, _, rest = key.partition(".")
    return copy.deepcopy(config) | {name: changed(config.get(name, {}), rest, value) if rest else value}


def rules(found):
    """Return the ids of the broken rules, without the system's name."""
    return [violation.rule.partition(".")[2] for violation in found.violations]


def agrees(found, expect):
    """Return the fields in which a verdict differs from the expected values."""
    ours = {**found.derived, "validator": found.validator, "run": found.run}
    return {
        name: (wanted, ours.get(name))
        for name, wanted in expect.items()
        if not name.startswith("original") and ours.get(name) != wanted
    }


def check_nearest(system, config, settings, found):
    """Assert that every nearest value fixes its rule and breaks no other."""
    before = {violation.rule for violation in found.violations}
    for violation in found.violations:
        for value in violation.nearest:
            key = violation.keys[0]
            others = [setting for setting in settings if not setting.startswith(f"{key}=")]
            given = [*others, f"{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"]
            after = {other.rule for other in verdict(system, config, *given).violations}
            assert after <= before - {violation.rule}, (violation, value, after)
