"""Where a model is: a folder, or an id on the Hugging Face hub; and what to say if it is neither.

Imports nothing heavy: the hub's client is loaded only for a name that is no folder.
"""

import difflib
import json
import re
from pathlib import Path

from .errors import KvqError, bad_input, one_line, unsupported

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# Files of a model without its weights, and with them.
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
ALL_FILES = [*SMALL_FILES, "*.safetensors"]


def find_model(model: str, local_files_only: bool, patterns: list[str] = ALL_FILES) -> Path:
    """The folder of a model. A hub id is downloaded into the hub's cache: the files that match `patterns`."""
    path = Path(model)
    if path.is_dir():
        refuse_adapter(path)
        return path
    if path.exists():
        raise bad_input(f"{model}: expected a model folder, found a file", "give the folder that holds config.json")
    if is_local(model):
        raise bad_input(f"{model}: no such folder", hint_of_neighbors(path))
    folder = download(model, patterns, local_files_only)
    refuse_adapter(folder)
    return folder


def is_local(model: str) -> bool:
    """Whether a name that is no folder can only be meant as one: it is no hub id, or its parent folder exists."""
    parent = Path(model).parent
    return not HUB_ID.fullmatch(model) or (parent != Path(".") and parent.is_dir())


def hint_of_neighbors(path: Path) -> str | None:
    """Names a folder beside `path` that is spelled much alike."""
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        missing = next((parent for parent in reversed(path.parents) if not parent.is_dir()), path.parent)
        return f"the folder {missing} does not exist, either" if str(missing) != "." else None
    close = difflib.get_close_matches(path.name, beside, 1)
    return f"did you mean {path.with_name(close[0])}?" if close else "expected a model folder, or the id of a hub model"


def refuse_adapter(folder: Path) -> None:
    """Refuses a LoRA adapter, and says how to make a model of it."""
    adapter = folder / "adapter_config.json"
    if (folder / "config.json").exists() or not adapter.is_file():
        return
    try:
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    raise unsupported(
        f"{folder}: a LoRA adapter{f' of {base}' if base else ''}, not a model: adapter_config.json, no config.json",
        'merge it first: pip install peft; python -c "from peft import AutoPeftModelForCausalLM as Adapter; '
        f"Adapter.from_pretrained('{folder}').merge_and_unload().save_pretrained('{folder}-merged')\"",
    )


def download(hub_id: str, patterns: list[str], local_files_only: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise bad_input(f"{hub_id}: no such folder", "hub ids need pip install huggingface_hub") from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, local_files_only=local_files_only))
    except Exception as error:  # the hub's client raises a dozen types
        raise explain(hub_id, error, local_files_only) from error


def explain(hub_id: str, error: Exception, local_files_only: bool) -> KvqError:
    """What a failure of the hub's client means: no such model, no permission, or no connection."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    neighbors = hint_of_neighbors(Path(hub_id))
    typo = f"{neighbors} " if neighbors and neighbors.startswith("did you mean") else ""
    if "GatedRepoError" in kinds:
        return bad_input(
            f"{hub_id}: the hub asks for permission: {one_line(error)}", "accept its terms there, then `hf auth login`"
        )
    if "RepositoryNotFoundError" in kinds:
        return bad_input(
            f"{hub_id}: no such folder, and the hub has no such model, or a private one",
            f"{typo or 'check the path or the hub id; '}a private model needs `hf auth login`",
        )
    if local_files_only:
        return bad_input(
            f"{hub_id}: no such folder, and not to be had from the hub: no model of this id was downloaded before",
            f"{typo or 'check the path; '}without --local-files-only the hub is asked",
        )
    return bad_input(
        f"{hub_id}: no such folder, and not to be had from the hub: {one_line(error)}",
        f"{typo or 'check the path or the hub id; '}a folder needs no hub",
    )
