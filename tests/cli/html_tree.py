"""Reads an HTML report strictly: every element is closed in order, and every chart is XML."""

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "wbr"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list["Node | str"] = field(default_factory=list)

    def walk(self):
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, tag: str) -> list["Node"]:
        return [node for node in self.walk() if node.tag == tag]

    def first(self, tag: str) -> "Node":
        return self.all(tag)[0]

    def has_class(self, name: str) -> bool:
        return name in self.attributes.get("class", "").split()

    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text() for child in self.children)

    def rows(self) -> list[list[str]]:
        """Cells of the first table, by row."""
        return [
            [cell.text() for cell in row.children if isinstance(cell, Node)] for row in self.first("table").all("tr")
        ]

    def numbers(self) -> list[list[str]]:
        """The cells of all tables, side by side. A wide table is split into several tables that repeat its first
        columns."""
        tables = [
            [[cell for cell in row.children if isinstance(cell, Node)] for row in table.all("tr")]
            for table in self.all("table")
        ]
        names = sum(cell.attributes.get("scope") == "row" for cell in tables[0][1])
        return [
            [cell.text() for cell in parts[0]] + [cell.text() for part in parts[1:] for cell in part[names:]]
            for parts in zip(*tables, strict=True)
        ]


class Builder(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.root = Node("")
        self.open = [self.root]

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parse(html: str) -> Node:
    builder = Builder()
    builder.feed(html)
    builder.close()
    assert builder.open == [builder.root], f"never closed: {[node.tag for node in builder.open]}"
    return builder.root


def charts(html: str) -> list[ElementTree.Element]:
    """Every <svg>, parsed as XML."""
    found, rest = [], html
    while (begin := rest.find("<svg")) >= 0:
        end = rest.index("</svg>", begin) + len("</svg>")
        found.append(ElementTree.fromstring(rest[begin:end]))
        rest = rest[end:]
    return found
