"""Checks a JSON value against a JSON schema: the words of draft 7 that the schemas of formats/ use, and no others."""

import re
from collections.abc import Callable, Iterator

# A check is a function of (value, what the schema says, whole schema, path); it yields (path, fault).
Faults = Iterator[tuple[str, str]]
TYPES: dict[str, Callable[[object], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: type(value) is int and value < 2**63,  # 2.0 is none, as in the C++ reader
    "number": lambda value: type(value) is float or (type(value) is int and value < 2**63),
}


def schema_fault(value: object, schema: dict) -> str:
    """The first fault, with its path; empty if the value fits."""
    for path, fault in _faults(value, schema, schema, ""):
        return f"{path or 'the document'}: {fault}"
    return ""


def _faults(value: object, rule: dict, root: dict, path: str) -> Faults:
    for word, wanted in rule.items():
        if word in CHECKS:
            yield from CHECKS[word](value, wanted, root, path)
        elif word not in SILENT:
            raise NotImplementedError(f"the schema word {word!r}")
    if "if" in rule:
        branch = rule.get("else" if _fits(value, rule["if"], root) is False else "then")
        if branch is not None:
            yield from _faults(value, branch, root, path)


def _fits(value: object, rule: dict, root: dict) -> bool:
    return next(_faults(value, rule, root, ""), None) is None


def _check_type(value, wanted, root, path) -> Faults:
    if not TYPES[wanted](value):
        yield path, f"expected {wanted}, found {_shown(value)}"


def _check_equal(value, wanted, root, path) -> Faults:
    if type(value) is not type(wanted) or value != wanted:
        yield path, f"expected {wanted!r}, found {_shown(value)}"


def _check_enum(value, wanted, root, path) -> Faults:
    if not any(type(value) is type(word) and value == word for word in wanted):
        yield path, f"expected one of {', '.join(map(str, wanted))}, found {_shown(value)}"


def _check_required(value, wanted, root, path) -> Faults:
    if isinstance(value, dict):
        for key in wanted:
            if key not in value:
                yield path, f"'{key}' is missing"


def _check_properties(value, wanted, root, path) -> Faults:
    if isinstance(value, dict):
        for key, rule in wanted.items():
            if key in value:
                yield from _faults(value[key], rule, root, f"{path}/{key}" if path else key)


def _check_items(value, wanted, root, path) -> Faults:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, wanted, root, f"{path}/{index}")


def _bound(is_broken: Callable[[float, float], bool], text: str):
    def check(value, wanted, root, path) -> Faults:
        if TYPES["number"](value) and is_broken(value, wanted):
            yield path, f"expected a number {text} {wanted}, found {_shown(value)}"

    return check


def _length(of: type, is_broken: Callable[[int, int], bool], text: str):
    def check(value, wanted, root, path) -> Faults:
        if isinstance(value, of) and is_broken(len(value), wanted):
            yield path, f"expected {text} {wanted} entries, found {len(value)}"

    return check


def _check_unique(value, wanted, root, path) -> Faults:
    if wanted and isinstance(value, list) and any(item in value[:index] for index, item in enumerate(value)):
        yield path, "expected different entries"


def _check_pattern(value, wanted, root, path) -> Faults:
    # $ of Python also matches before a final line feed.
    if isinstance(value, str) and not re.search(wanted.replace("$", r"\Z"), value):
        yield path, f"expected {wanted}, found {_shown(value)}"


def _check_all(value, wanted, root, path) -> Faults:
    for rule in wanted:
        yield from _faults(value, rule, root, path)


def _check_any(value, wanted, root, path) -> Faults:
    if not any(_fits(value, rule, root) for rule in wanted):
        yield path, "fits none of the alternatives"


def _check_not(value, wanted, root, path) -> Faults:
    if _fits(value, wanted, root):
        yield path, "fits what is excluded"


def _check_reference(value, wanted, root, path) -> Faults:
    rule = root
    for step in wanted.removeprefix("#/").split("/"):
        rule = rule[step]
    yield from _faults(value, rule, root, path)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


CHECKS = {
    "type": _check_type,
    "const": _check_equal,
    "enum": _check_enum,
    "required": _check_required,
    "properties": _check_properties,
    "items": _check_items,
    "minimum": _bound(lambda value, limit: value < limit, "of at least"),
    "maximum": _bound(lambda value, limit: value > limit, "of at most"),
    "exclusiveMinimum": _bound(lambda value, limit: value <= limit, "above"),
    "minItems": _length(list, lambda count, limit: count < limit, "at least"),
    "maxItems": _length(list, lambda count, limit: count > limit, "at most"),
    "minLength": _length(str, lambda count, limit: count < limit, "at least"),
    "uniqueItems": _check_unique,
    "pattern": _check_pattern,
    "allOf": _check_all,
    "anyOf": _check_any,
    "not": _check_not,
    "$ref": _check_reference,
}
SILENT = frozenset({"$schema", "title", "definitions", "if", "then", "else"})
