"""A page of HTML, read as a browser would read it."""

from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Page(HTMLParser):
    """Checks that elements close in order, and collects them with their attributes, and
    the text between them.
    """

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(text)
        assert not self.open

    @property
    def names(self):
        """The names of the elements, in order."""
        return [tag for tag, _ in self.elements]

    def handle_starttag(self, tag, attrs):
        """Note an element."""
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Close the newest element, which must be this one."""
        assert self.open.pop() == tag

    def handle_data(self, data):
        """Keep the text that a reader sees."""
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)
