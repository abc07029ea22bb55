"""Tests of rampup.contrib.rl.starting_sizes."""

import json

import pytest

from rampup.contrib.check import check_file
from rampup.contrib.rl.starting_sizes import SYSTEMS, suggest
from rampup.errors import ConfigError, RampupError


@pytest.mark.parametrize(
    ("system", "params", "label", "published", "repository", "is_guess"),
    [
        ("trlx", "125M", "125M-1B", (32, 128, 128, None), (32, 128, 16, 4), False),
        ("trlx", "1B", "125M-1B", (32, 128, 128, None), (8, 64, 16, 4), False),
        ("trlx", "1000000001", "6B", (4, 128, 16, None), (4, 64, 16, 4), True),
        ("trlx", "6.1B", "20B", (1, 16, 4, 2), (1, 16, 4, 2), True),
        ("trlx", "70B", "20B", (1, 16, 4, 2), (1, 16, 4, 2), True),
        ("skyrl", "125M", "0.5B-3B", (512, 128, 2, 8, 4), None, True),
        ("skyrl", "3B", "0.5B-3B", (512, 128, 2, 8, 4), None, False),
        ("skyrl", "3000000001", "7B-14B", (256, 64, 1, 8, 8), None, True),
        ("skyrl", "70B", "70B+", (128, 32, 1, 4, 16), None, False),
    ],
)
def test_suggest_from_a_table(system, params, label, published, repository, is_guess):
    """The row of this model size or the next larger one, the repository's sizes, what
    follows from them, and the source.
    """
    suggestion = suggest(params, system=system).to_dict()
    assert (suggestion["published_for"], tuple(suggestion["published"].values())) == (
        label,
        published,
    )
    assert (
        suggestion["repository"] and tuple(suggestion["repository"].values()),
        suggestion["memory"],
    ) == (repository, None)
    text = " ".join(suggestion["notes"])
    words = ["rampup tune", "noisier", "diverse experience"]
    words += (
        [
            "out of memory: first trainer.gradient_checkpointing=true",
            "slow: fewer responses",
        ]
        if system == "skyrl"
        else []
    )
    assert all(word in text for word in words)
    assert text.count("community guide") == 1
    assert ("a guess" in text) == is_guess


@pytest.mark.parametrize(
    ("params", "gib", "devices"),
    [
        ("1B", 80, 1),
        (80 * 2**30 // 18, 80, 1),
        (80 * 2**30 // 18 + 1, 80, 2),
        ("70B", 80, 15),
    ],
)
def test_memory_rule_of_thumb(params, gib, devices):
    """18 bytes per parameter are shared by the smallest number of devices, exactly at
    the boundary.
    """
    memory = suggest(params, system="verl", memory_gib=gib).memory
    assert memory["least_devices"] == devices
    assert 0 <= memory["free_gib_per_device"] < gib


@pytest.mark.parametrize("params", ["1B", "7B", "70B"])
def test_sizes_for_skyrl_are_accepted_by_its_rules(tmp_path, params):
    """A file with the suggested sizes runs, and its numbers are those of the notes."""
    suggestion = suggest(params, system="skyrl")
    sizes = suggestion.published
    settings = [
        f"trainer.placement.{model}_num_gpus_per_node={sizes['num_devices']}"
        for model in ("policy", "ref")
    ]
    path = tmp_path / "skyrl.yml"
    groups = {
        "trainer": dict(list(sizes.items())[:3]),
        "generator": {"n_samples_per_prompt": sizes["n_samples_per_prompt"]},
    }
    path.write_text(json.dumps(groups))
    verdict = check_file(path, "skyrl", settings)
    assert verdict.ok
    derived = verdict.derived
    note = next(note for note in suggestion.notes if "optimizer steps of" in note)
    assert (
        f"{derived['optimizer_steps']} optimizer steps of"
        f" {derived['mini_batch_samples']:,}" in note
    )
    assert (
        f"{derived['data_parallel_size']} replicas * {derived['accumulation_steps']}"
        " passes" in note
    )


@pytest.mark.parametrize(
    "system", [name for name in SYSTEMS if name not in ("trlx", "skyrl")]
)
def test_suggest_for_systems_without_a_table(system):
    """Without memory, the error names the systems with a table. With memory, a note
    says so.
    """
    with pytest.raises(ConfigError, match="only for trlx") as caught:
        suggest("6B", system=system)
    assert caught.value.key == "memory-gib"
    suggestion = suggest("6B", system=system, memory_gib="80")
    assert suggestion.published is None
    assert any(
        "no table of starting sizes is published" in note for note in suggestion.notes
    )


@pytest.mark.parametrize(
    ("params", "memory", "key"),
    [
        *(
            (params, None, "params")
            for params in ("0", "-1", "6X", "", "1e30", "0.5", "nan", "B")
        ),
        *(
            ("6B", memory, "memory-gib")
            for memory in ("0", "-80", "x", "nan", "inf", "1e7", "1e-18", "")
        ),
    ],
)
def test_suggest_rejects_bad_numbers(params, memory, key):
    """The number of parameters is a whole number of at least 1, and memory a number
    above 0.
    """
    with pytest.raises(RampupError) as caught:
        suggest(params, system="trlx", memory_gib=memory)
    assert caught.value.key == key
