"""Tests of rampup.config.yaml."""

import pytest

from rampup.config.yaml import MAX_BYTES, parse_mapping, parse_scalar, positions, read_text
from rampup.errors import ConfigError


def values(text):
    """Return the parsed values by name."""
    return {name: located.value for name, located in parse_mapping(text, "file.yml").items()}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.e-8", 1e-8),
        (".5", 0.5),
        ("10_000", 10_000),
        ("1_0.5", 10.5),
        ("010", 10),
        ("-1", -1),
        ("None", None),
        ("null", None),
        ("", None),
        ("yes", True),
        ("True", True),
        ("0:8 100:16", "0:8 100:16"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        *((text, text) for text in ("2024__01", "2024_", "1__0.5", "1_.5", "1_e5")),
        ("0x10", "0x10"),
        ("1/3", "1/3"),
        ("nonesuch", "nonesuch"),
        (".inf", float("inf")),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    """Numbers are exact and decimal, 1e-5 is a float, None is null, and colons and dates stay text."""
    assert parse_scalar(text, "command line") == value
    assert values(f"key: {text}")["key"] == value
    assert type(values(f"key: {text}")["key"]) is type(value)


def test_parse_mapping_records_lines():
    """Every value carries file and line."""
    parsed = parse_mapping("# comment\na: 1\n\nb:\n  - 2\n  - x: 3\n", "file.yml")
    found = {name: (entry.value, str(entry)) for name, entry in parsed.items()}
    assert found == {"a": (1, "file.yml:2"), "b": ([2, {"x": 3}], "file.yml:4")}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "is empty"),
        ("# only a comment\n", None, "is empty"),
        ("- 1\n- 2\n", 1, "is a list"),
        ("just text", 1, "is a single value"),
        ("a: 1\nb: 2\na: 3\n", 3, "a is given twice, first in line 1"),
        ("a: [1\nb: 2", 2, "not valid YAML"),
        ("a: 1\n\tb: 2", 2, "indent with spaces, not tabs"),
        ("a:\u00a01\nb: 2", 2, "not allowed here; line 1 has U+00A0 (no-break space) instead of a space"),
        ("a: !!python/object/apply:os.system ['ls']", 1, "python/object/apply"),
        ("a: !!binary aGk=", 1, "binary"),
        ("a: !mine 3", 1, "!mine"),
        ("? [1, 2]\n: 3", 1, "a key must be a plain name"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: \x00", None, "not valid YAML"),
        ("a: " + "[" * 200 + "]" * 200, 1, "too deeply"),
        ("a: " + "9" * 5000, 1, "is not a usable number"),
    ],
)
def test_parse_mapping_refuses_invalid_files(text, line, message):
    """The error about an invalid file has the line."""
    with pytest.raises(ConfigError) as caught:
        parse_mapping(text, "file.yml")
    assert message in str(caught.value)
    assert (caught.value.path, caught.value.line) == ("file.yml", line)


def test_parse_mapping_limits_aliases_and_depth():
    """Aliases of aliases are not expanded into memory, and deep nesting is refused."""
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    with pytest.raises(ConfigError, match="too large"):
        parse_mapping(bomb, "bomb.yml")
    with pytest.raises(ConfigError, match="too deeply"):
        parse_mapping("a: " + "[" * 50_000, "deep.yml")


def test_read_text_refuses_unreadable_files(tmp_path):
    """A missing file, a folder, a huge file and one that is not UTF-8 are errors."""
    (tmp_path / "binary.yml").write_bytes(b"a: \xff\xfe")
    (tmp_path / "huge.yml").write_bytes(b"a: 1\n" + b"#" * MAX_BYTES)
    messages = {"missing.yml": "No such file", "": "directory", "binary.yml": "not UTF-8", "huge.yml": "larger than"}
    for name, message in messages.items():
        with pytest.raises(ConfigError, match=message):
            read_text(tmp_path / name)


def test_positions_of_keys_and_values():
    """Keys and values are found in any context; values with an alias, an anchor or a tag are left out."""
    text = "# x: 1\r\na:  5 # five\r\n\"b\": 'six'\nc:\nd: [1,\n 2]\ne: &e 1\nf: *e\ng: !!str 3\n"
    found = {name: (text[key], text[value]) for name, (key, value) in positions(text).items()}
    assert found == {"a": ("a", "5"), "b": ('"b"', "'six'"), "c": ("c", ""), "d": ("d", "[1,\n 2]")}
