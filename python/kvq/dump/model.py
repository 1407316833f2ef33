"""From a folder or a hub id to a model that is ready to run, and what identifies it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

from ..errors import EXIT_INPUT, EXIT_UNSUPPORTED, KvqError, one_line
from ..model_source import ALL_FILES, SMALL_FILES, find_model
from .families import Family, family_of, refuse_inexpressible
from .placement import Placement, refuse_missing_packages

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk: everything that is known before the weights are loaded.

    `config` is the configuration of the text half, `whole_config` that of the whole model: the same object unless the
    model is multimodal.
    """

    path: Path
    name: str
    family: Family
    config: object
    config_json: str
    whole_config: object

    @property
    def weight_files(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))


def quiet_libraries() -> None:
    """Silences advice and progress bars of transformers on stderr, so that only this program's messages appear."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def open_model_folder(model: str, local_files_only: bool, with_weights: bool = True) -> ModelFolder:
    """Finds the folder, downloads it from the hub if needed, and refuses unsupported models before weights are
    downloaded."""
    path = find_model(model, local_files_only, SMALL_FILES)
    if Path(model).is_dir():
        return _read_folder(path, path.resolve().name)
    folder = _read_folder(path, model)
    return _read_folder(find_model(model, local_files_only, ALL_FILES), model) if with_weights else folder


def _parse_config(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KvqError(
            EXIT_INPUT, f"{path}: cannot read: {error.strerror}", "expected a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise KvqError(EXIT_INPUT, f"{path}: not valid JSON: {one_line(error)}") from error


def _read_folder(path: Path, name: str) -> ModelFolder:
    tree = _parse_config(path / "config.json")
    family = family_of(tree, name)
    refuse_missing_packages(tree, name)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # each configuration class has checks of its own
        raise KvqError(EXIT_INPUT, f"{path / 'config.json'}: {one_line(error)}") from error
    text_config = config.get_text_config()
    refuse_inexpressible(text_config, family)
    return ModelFolder(path, name, family, text_config, (path / "config.json").read_text(encoding="utf-8"), config)


def stored_dtype(folder: ModelFolder) -> str:
    """Name of the weights' type: from the configuration, else from the first tensor of the weight files."""
    declared = getattr(folder.config, "dtype", None) or getattr(folder.whole_config, "dtype", None)
    names = {dtype: name for name, dtype in DTYPES.items()}
    if declared in names:
        return names[declared]
    for path in folder.weight_files:
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors = [entry for key, entry in sorted(header.items()) if key != "__metadata__"]
        if tensors:
            return SAFETENSORS_DTYPES.get(tensors[0]["dtype"], "float32")
    return "float32"


def model_class(config):
    """The class that makes a model of this whole configuration: with or without a part for images."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def load_model(folder: ModelFolder, compute_dtype: str, placement: Placement):
    """The causal language model, or the multimodal model around it, in evaluation mode, without gradients for its
    weights."""
    try:
        model, report = model_class(folder.whole_config).from_pretrained(
            folder.path,
            config=folder.whole_config,
            dtype=DTYPES[compute_dtype],
            local_files_only=True,
            output_loading_info=True,
            device_map=placement.device_map,
        )
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:  # a quantized checkpoint, or code of a model
        message = f"{folder.path}: cannot load the model: {one_line(error)}"
        raise KvqError(EXIT_UNSUPPORTED, message, "install the package that this line names") from error
    except Exception as error:  # any fault of the files: OSError, ValueError, SafetensorError, RuntimeError
        raise KvqError(EXIT_INPUT, f"{folder.path}: cannot load the model: {one_line(error)}") from error
    _refuse_missing_weights(folder, report)
    if placement.device_map is None:
        try:
            model.to(placement.device)
        except (RuntimeError, AssertionError) as error:
            raise KvqError(EXIT_UNSUPPORTED, f"device '{placement.device}': {one_line(error)}") from error
    return model.eval().requires_grad_(False)


def _refuse_missing_weights(folder: ModelFolder, report: dict) -> None:
    """Refuses checkpoints that lack weights, because transformers fills missing weights with random numbers and goes
    on."""
    lacking = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if lacking:
        raise KvqError(
            EXIT_INPUT,
            f"{folder.path}: {len(lacking)} tensors are missing or have another shape than "
            f"config.json says, the first: {lacking[0]}",
        )


def load_tokenizer(folder: ModelFolder, chat_template: str | None = None):
    """The tokenizer; @param chat_template  a file with a template that takes the place of the tokenizer's own"""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
    except Exception as error:  # each tokenizer class raises its own types
        raise KvqError(
            EXIT_INPUT,
            f"{folder.path}: cannot load the tokenizer: {one_line(error)}",
            "--synthetic-tokens N needs no tokenizer",
        ) from error
    if chat_template:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KvqError(EXIT_INPUT, f"{chat_template}: cannot read: {one_line(error)}") from error
    return tokenizer


def default_prefix(tokenizer, config) -> list[int]:
    """The tokens that begin every sequence: those that the tokenizer puts in front, else the configuration's BOS, if
    any."""
    if tokenizer is not None:
        plain = tokenizer("a", add_special_tokens=False).input_ids
        full = tokenizer("a").input_ids
        added = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
        if added:
            return full[:added]
    bos = getattr(config, "bos_token_id", None)
    return [bos] if isinstance(bos, int) else []


def eos_tokens(config) -> list[int]:
    eos = getattr(config, "eos_token_id", None)
    return [eos] if isinstance(eos, int) else list(eos or [])


def fingerprint(folder: ModelFolder) -> str | None:
    """`model_fingerprint` of formats/dump.md; None for a folder without safetensors, because the fingerprint covers
    only those."""
    if not folder.weight_files:
        return None
    files = sorted([folder.path / "config.json", *folder.weight_files], key=lambda path: path.name)
    lines = "".join(f"{_sha256_of(path)}  {path.name}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
