"""A page of results as a browser reads it."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """The tags and texts of a page; each tag must be closed in its place, and ``open`` are those that are not."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "path":
            assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.texts += [data.strip()] if data.strip() else []
