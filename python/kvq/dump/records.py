"""Texts as they are given: plain files, JSONL with chats or texts, standard input, data sets of the hub."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..errors import EXIT_INPUT, EXIT_UNSUPPORTED, KvqError, one_line

# Fields of a record that hold its text, the first choice first. `conversations` is messages with `from` and `value`.
FIELDS = ("messages", "conversations", "text", "prompt")
ROLES = {"human": "user", "gpt": "assistant"}  # of `conversations`, as chat templates call them
JSONL_SUFFIXES = (".jsonl", ".ndjson")
STANDARD_INPUT = "standard input"
DATASET_RECORDS = 1000  # taken of a data set if --records does not say


@dataclass(frozen=True)
class Record:
    """A text, or the messages of a chat, and where it was read: file and line."""

    where: str
    text: str | None = None
    messages: list[dict] | None = None


@dataclass(frozen=True)
class Source:
    """One --text or --dataset. A plain text is one record."""

    name: str
    records: list[Record]
    is_plain: bool = False


def fault(message: str, hint: str | None = None) -> KvqError:
    return KvqError(EXIT_INPUT, message, hint)


def read_source(path: str, text_format: str, field: str | None, most: int | None) -> Source:
    """@param path  of a file; - is standard input
    @param text_format  text, jsonl, or auto: by the file's name
    @param field        of records; None: the first of FIELDS
    @param most         records to take; None: all"""
    name = STANDARD_INPUT if path == "-" else path
    text = decode_utf8(read_bytes(path), name)
    if not text.strip():
        raise fault(f"{name}: expected text, found an empty file")
    if text_format == "jsonl" or (text_format == "auto" and path.endswith(JSONL_SUFFIXES)):
        return Source(name, list(islice(parse_lines(text, name, field), most)))
    if text_format == "auto":
        refuse_json(text, name)
    return Source(name, [Record(name, text)], is_plain=True)


def read_bytes(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        hint = None
        if isinstance(error, FileNotFoundError) and "." not in Path(path).name and path.count("/") <= 1:
            hint = f"a data set of the hub: --dataset {path}"
        raise fault(f"{path}: cannot read: {error.strerror}", hint) from error


def decode_utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise fault(
            f"{name}: expected UTF-8 text, found byte {data[error.start]:#04x} at offset {error.start}",
            "--dataset reads parquet and other files of data sets" if data[:4] == b"PAR1" else None,
        ) from error


def refuse_json(text: str, name: str) -> None:
    """Refuses text that is JSON: a model would be run over quotes and braces."""
    if not text.lstrip().startswith(("{", "[")):
        return
    as_it_is = "--text-format text takes it as it is"
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and all(is_container(line) for line in lines[:3]):
        raise fault(
            f"{name}: expected plain text, found JSON in each line",
            f"--text-format jsonl reads a record from each line; {as_it_is}",
        )
    if is_container(text):
        raise fault(
            f"{name}: expected plain text, found a JSON document",
            f"make it JSONL, one record a line: jq -c '.[]' {name} > chat.jsonl; {as_it_is}",
        )


def is_container(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def parse_lines(text: str, name: str, field: str | None) -> Iterable[Record]:
    """One record for each line that is not blank."""
    found = False
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise fault(
                f"{name}:{number}: not valid JSON: {one_line(error)}", "expected one JSON object a line"
            ) from error
        found = True
        yield parse_record(value, f"{name}:{number}", field)
    if not found:
        raise fault(f"{name}: expected records, found none")


def read_dataset(name: str, config: str | None, split: str, field: str | None, most: int | None) -> Source:
    """The first records of a data set, streamed, so that only these are downloaded."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise KvqError(
            EXIT_UNSUPPORTED, "--dataset: the Python package datasets is missing", "pip install datasets"
        ) from error
    try:
        rows = list(islice(load_dataset(name, config, split=split, streaming=True), most or DATASET_RECORDS))
    except Exception as error:  # the package raises its own types and those of the hub's client
        raise fault(
            f"{name}: cannot read the data set: {one_line(error)}", "--split and --dataset-config choose a part"
        ) from error
    if not rows:
        raise fault(f"{name}: expected records in split {split}, found none")
    return Source(name, [parse_record(row, f"{name}[{index}]", field) for index, row in enumerate(rows)])


def parse_record(value: object, where: str, field: str | None) -> Record:
    if not isinstance(value, dict):
        raise fault(f"{where}: expected a JSON object, found {kind_of(value)}")
    name = field or next((name for name in FIELDS if name in value), None)
    if name is None or name not in value:
        wanted = f"a field {field}" if field else f"one of the fields {', '.join(FIELDS)}"
        known = ", ".join(map(repr, list(value)[:8])) or "none"
        raise fault(f"{where}: expected {wanted}, found {known}", "--field NAME chooses another field")
    content = value[name]
    if isinstance(content, str):
        return Record(where, content)
    if not isinstance(content, list) or not content:
        raise fault(f"{where}: {name}: expected a text or a list of messages, found {kind_of(content)}")
    return Record(where, messages=[parse_message(each, f"{where}: {name}[{i}]") for i, each in enumerate(content)])


def parse_message(value: object, where: str) -> dict:
    """A message with the fields that chat templates read; content in parts becomes one text."""
    if not isinstance(value, dict):
        raise fault(f"{where}: expected a message, found {kind_of(value)}", 'as in {"role": "user", "content": "Hi"}')
    role_field, content_field = ("from", "value") if "from" in value and "role" not in value else ("role", "content")
    role = value.get(role_field)
    if not isinstance(role, str):
        raise fault(f"{where}.{role_field}: expected a text, found {kind_of(role)}")
    content = value.get(content_field)
    if isinstance(content, list):
        content = "".join(parse_part(part, f"{where}.{content_field}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str) and not (content is None and value.get("tool_calls")):
        raise fault(f"{where}.{content_field}: expected a text, found {kind_of(content)}")
    rest = {key: each for key, each in value.items() if key not in (role_field, content_field)}
    return {"role": ROLES.get(role, role), "content": content or "", **rest}


def parse_part(value: object, where: str) -> str:
    if isinstance(value, dict) and value.get("type") == "text" and isinstance(value.get("text"), str):
        return value["text"]
    found = f"type {value['type']!r}" if isinstance(value, dict) and "type" in value else kind_of(value)
    raise fault(f"{where}: expected a part of type 'text', found {found}")


def kind_of(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "nothing"}
    if isinstance(value, list | str) and not value:
        return f"an empty {names[type(value)].split()[1]}"
    return names.get(type(value), "a number")


# Tokens


def encode_source(source: Source, tokenizer, prefix: list[int], separate: bool) -> list[tuple[str, list[int]]]:
    """(name, token ids) of each text that windows are cut from: the whole source, or each record if `separate`.

    Chats get the tokenizer's template. Texts of one source are separated by a blank line. The tokens that begin every
    sequence are removed where a chat begins with them, because sequences get them when they are cut.
    """
    encoded = []
    for index, record in enumerate(source.records):
        is_last = separate or index + 1 == len(source.records)
        encoded.append((record.where, encode_record(record, tokenizer, prefix, is_last)))
    if separate:
        return [(where, tokens) for where, tokens in encoded if tokens]
    return [(source.name, [token for _, tokens in encoded for token in tokens])]


def encode_record(record: Record, tokenizer, prefix: list[int], is_last: bool) -> list[int]:
    if record.messages is None:
        text = record.text if is_last else f"{record.text}\n\n"
    else:
        text = apply_template(record, tokenizer)
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    begins = record.messages is not None and prefix and tokens[: len(prefix)] == prefix
    return tokens[len(prefix) :] if begins else tokens


def apply_template(record: Record, tokenizer) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise fault(
            f"{record.where}: messages need a chat template, and the tokenizer has none",
            "--chat-template FILE gives one; or use the model that is tuned for chats",
        )
    try:
        return tokenizer.apply_chat_template(record.messages, tokenize=False)
    except ImportError as error:
        raise KvqError(EXIT_UNSUPPORTED, f"chat templates: {one_line(error)}", "pip install jinja2") from error
    except Exception as error:  # templates raise what they like, for roles out of order for instance
        raise fault(f"{record.where}: the chat template refuses the messages: {one_line(error)}") from error


def describe(source: Source, count: int) -> str:
    """ "chat.jsonl: 40 records, 38 of them chats, 12345 tokens" """
    if source.is_plain:
        return f"{source.name}: {count} tokens"
    chats = sum(record.messages is not None for record in source.records)
    kind = "all of them chats" if chats == len(source.records) else f"{chats} of them chats" if chats else "texts"
    return f"{source.name}: {len(source.records)} records, {kind}, {count} tokens"
