"""Files of other systems: helpers that write and check them."""

import functools
import json
import operator
import tempfile
from pathlib import Path

import pytest
import yaml

from rampup.contrib.check import check_file

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


def nested(flat):
    """Return dotted keys as nested mappings."""
    result = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        functools.reduce(lambda node, part: node.setdefault(part, {}), parents, result)[
            last
        ] = value
    return result


def rules(found):
    """Return the ids of the broken rules, without the system's name."""
    return [violation.rule.partition(".")[2] for violation in found.violations]


def expect(found, *, note=(), no_note=(), message="", **wanted):
    """Assert numbers of a verdict, its `rules` and `ok`, texts that are in its notes,
    or in none, and one in a message.
    """
    ours = {
        **found.derived,
        "validator": found.validator,
        "run": found.run,
        "ok": found.ok,
        "rules": rules(found),
    }
    assert {name: ours.get(name, "absent") for name in wanted} == wanted
    notes, messages = (
        "\n".join(found.notes),
        "\n".join(violation.message for violation in found.violations),
    )
    assert not [
        text
        for text in ([note] if isinstance(note, str) else note)
        if text not in notes
    ], notes
    assert not [
        text
        for text in ([no_note] if isinstance(no_note, str) else no_note)
        if text in notes
    ], notes
    assert message in messages


def checker(system, base):
    """Return a function that checks a base file, in dotted keys, with changes; None
    takes a key away.
    """

    def check(*changes):
        flat = functools.reduce(operator.or_, changes, base)
        return verdict(
            system,
            nested({key: value for key, value in flat.items() if value is not None}),
        )

    return check


def boundary_test(system, base, rows, *, exact=False):
    """Return a test of rows: a rule, changes that just hold, changes that just break
    it, and the check's verdict on those.

    `exact` rows name all rules that the second changes break.
    """

    @pytest.mark.parametrize(("rule", "holds", "breaks", "validator"), rows)
    def test(rule, holds, breaks, validator):
        valid, invalid = checker(system, base)(holds), checker(system, base)(breaks)
        assert valid.ok, rules(valid)
        assert (rules(invalid) == rule.split()) if exact else (rule in rules(invalid))
        assert (invalid.validator, invalid.run) == (validator, "fails")
        flat = {
            key: value for key, value in (base | breaks).items() if value is not None
        }
        check_nearest(system, nested(flat), [], invalid)

    return test


def numbers_test(check, rows):
    """Return a test of rows: what is checked, and what the system makes of it, with
    notes on what is legal but surprising.
    """

    @pytest.mark.parametrize(("given", "wanted"), rows)
    def test(given, wanted):
        expect(check(given), **wanted)

    return test


def check_nearest(system, config, settings, found):
    """Assert that every nearest value fixes its rule and breaks no other."""
    before = {violation.rule for violation in found.violations}
    for violation in found.violations:
        for value in violation.nearest:
            key = violation.keys[0]
            others = [
                setting for setting in settings if not setting.startswith(f"{key}=")
            ]
            given = [
                *others,
                (
                    f"{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
                ),
            ]
            after = {other.rule for other in verdict(system, config, *given).violations}
            assert after <= before - {violation.rule}, (violation, value, after)
