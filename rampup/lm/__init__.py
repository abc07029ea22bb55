"""The byte-level language model that `rampup train` trains."""

from rampup import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "LoadedRun": "rampup.lm.load",
        "Run": "rampup.lm.train",
    },
)
