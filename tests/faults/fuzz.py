"""Coverage-guided fuzzing of the YAML and schedule readers: `PYTHONPATH=tests python -m faults.fuzz -max_total_time=300`.

Needs the package atheris. A crash is an exception other than RampupError; a timeout is a reader that hangs.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports():
    import yaml  # noqa: F401 - instrumented

    from rampup.config.yaml import parse_mapping
    from rampup.plan.ramp import BatchRamp
from rampup.errors import RampupError

SCHEDULES = ("0:768 250B:1536", "0:8,1K:16", "0:1 1e3:2", "0:4.0 1.5K:6m", "0:1_0 5:0x1")
PART = 350


def read(data):
    """Pass bytes to one of the two readers."""
    provider = atheris.FuzzedDataProvider(data)
    as_yaml = provider.ConsumeBool()
    text = provider.ConsumeUnicodeNoSurrogates(400)
    try:
        if as_yaml:
            parse_mapping(text, "fuzz")
        else:
            BatchRamp.from_schedule(text, sequence_length=7 if len(text) % 2 else None)
    except RampupError:
        pass


def main():
    """Fuzz, starting from parts of our own configurations."""
    with tempfile.TemporaryDirectory() as corpus:
        for number, text in enumerate(SCHEDULES):
            (Path(corpus) / f"schedule{number}").write_bytes(b"\0" + text.encode())
        for path in (Path(__file__).parents[2] / "configs").glob("*.yml"):
            content = path.read_bytes()
            for start in range(0, len(content), PART):
                (Path(corpus) / f"{path.stem}{start}").write_bytes(b"\1" + content[start : start + PART + 40])
        atheris.Setup([sys.argv[0], corpus, *sys.argv[1:]], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
