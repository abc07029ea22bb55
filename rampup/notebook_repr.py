"""The HTML form of an object in a notebook.

The one exception to the rule that imports point down: `rampup.show` is imported only when a notebook asks for the HTML, so
that the classes themselves stay free of presentation.
"""


class NotebookRepr:
    """Mixin that renders an object as HTML in notebooks."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from rampup.show.notebook import to_html

        return to_html(self)
