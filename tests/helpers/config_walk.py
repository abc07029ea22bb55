"""Counts the files that one configuration passes through in `rampup train`, from `load_config` to the first training step.

    python tests/helpers/config_walk.py [-v]        # of the `rampup` on PYTHONPATH; -v lists the walk

The walk is the sequence of calls, in the main thread, of functions in `rampup/` that

- receive the configuration: a `Config` is among the arguments, or among the variables of the enclosing function that it uses,
  directly or as an attribute of `self`; or
- are on the call path of the run: they are on the stack when the first training step is called.

It begins with the call of `load_config` and ends with the call of the first training step. Each call stands for the file of
its function. Generated functions, such as a dataclass's `__init__`, and functions without a name (lambdas, comprehensions)
stand for no file. Files are counted once. A return is a call into a file that the walk has visited before and has left since.
To stay in a file is no return, nor is the end of a function, after which its caller continues.

The wider walk has also every call that one of those functions makes, such as `make_mesh(axes)`: the files that somebody reads
who wants to know what becomes of the configuration's values.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SETTINGS = {
    "steps": 1,
    "dataset_type": "synthetic",
    "max_target_length": 16,
    "base_emb_dim": 16,
    "base_num_decoder_layers": 1,
    "base_num_query_heads": 2,
    "base_mlp_dim": 32,
    "eval_steps": 1,
    "run_name": "run",
    "jax_cache_dir": "null",
}


@dataclass
class Walk:
    """The calls of a walk.

    Attributes:
        calls: (file, function), in the order of the calls.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """The file of each call, without repetitions in a row."""
        files = [file for file, _ in self.calls]
        return [file for place, file in enumerate(files) if place == 0 or files[place - 1] != file]

    @property
    def num_files(self) -> int:
        """Different files."""
        return len(set(self.files))

    @property
    def num_returns(self) -> int:
        """Visits of a file that was visited before and left."""
        return len(self.files) - self.num_files


class FirstStepError(BaseException):
    """Ends the run at its first training step."""


class Tracer:
    """A profile function that notes the calls of a walk.

    Args:
        package: the folder of the package.
        config_class: the class of the configuration.
        step_code: the code of the training step's call.
    """

    def __init__(self, package: Path, config_class: type, step_code: CodeType) -> None:
        self._package, self._config_class, self._step_code = str(package), config_class, step_code
        self._calls: list[tuple[str, str]] = []
        self._callers: list[int | None] = []
        self._with_config: set[int] = set()
        self._places: dict[int, int] = {}
        self.on_path: set[int] = set()
        self.begun = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG002 - as `sys.setprofile` calls it
        """Note a call of a function in the package."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._package):
            return
        self.begun = self.begun or code.co_name == "load_config"
        if not self.begun or code.co_name.startswith("<"):
            return
        place = len(self._calls)
        self._calls.append((str(Path(code.co_filename).relative_to(self._package)), code.co_name))
        stack = self._stack(frame.f_back)
        self._callers.append(stack[0] if stack else None)
        self._places[id(frame)] = place
        if any(map(self._is_config, frame.f_locals.items())):
            self._with_config.add(place)
        if code is self._step_code:
            self.on_path = {place, *stack}
            sys.setprofile(None)
            raise FirstStepError

    def _stack(self, frame: FrameType | None) -> list[int]:
        """Return the calls that a frame and those below it stand for, the newest first."""
        found = []
        while frame is not None:
            # Of frames that had the same address one after the other, only the newest call can be on the stack.
            place = self._places.get(id(frame))
            if place is not None and self._calls[place][1] == frame.f_code.co_name:
                found.append(place)
            frame = frame.f_back
        return found

    def walk(self, *, with_callees: bool) -> Walk:
        """Return the walk, or the wider one."""
        own = self._with_config | self.on_path
        wider = {place for place, caller in enumerate(self._callers) if caller in own} if with_callees else set()
        return Walk([call for place, call in enumerate(self._calls) if place in own | wider])

    def _is_config(self, item: tuple[str, Any]) -> bool:
        name, value = item
        if isinstance(value, self._config_class):
            return True
        return name == "self" and any(isinstance(part, self._config_class) for part in _attributes(value))


def _attributes(value: Any) -> list[Any]:
    """Return the attributes of an object without calling any of its code."""
    names = {
        *getattr(value, "__dict__", ()),
        *(name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())),
    }
    found = []
    for name in names:
        with contextlib.suppress(Exception):
            found.append(object.__getattribute__(value, name))
    return found


def trace_train(folder: str) -> Tracer:
    """Run `rampup train` on configs/base.yml with a tiny model up to its first step; return the tracer."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import rampup
    from rampup.cli import main
    from rampup.config.schema import Config
    from rampup.run.step import TrainStep

    package = Path(rampup.__file__).parent
    tracer = Tracer(package, Config, TrainStep.__call__.__code__)
    words = [f"{key}={value}" for key, value in (SETTINGS | {"base_output_directory": folder}).items()]
    base = package.parent / "configs" / "base.yml"
    sys.setprofile(tracer)
    try:
        # `main` reports what it does not know as an error of the command; the walk is complete then.
        main(["train", str(base), *words, "--quiet"])
    except FirstStepError:
        pass
    finally:
        sys.setprofile(None)
    assert tracer.on_path, "the run did not reach its first step"
    return tracer


def main() -> None:
    """Print the walk of the `rampup` that is imported here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-v", "--verbose", action="store_true", help="list every call")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tracer = trace_train(folder)
    walk, wider = tracer.walk(with_callees=False), tracer.walk(with_callees=True)
    if args.verbose:
        previous = ""
        for file, name in walk.calls:
            print(f"{file if file != previous else '':<32} {name}")
            previous = file
    print(f"walk: {walk.num_files} files, {walk.num_returns} returns to a file that was left")
    print(f"wider walk: {wider.num_files} files, {wider.num_returns} returns")


if __name__ == "__main__":
    main()
