"""What a Hugging Face config.json says about RoPE and the attention window, for dumps that do not say it themselves."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import bad_input, unsupported
from .families import FAMILIES

# Models whose config.json alone tells how every layer rotates: no layers without RoPE, no defaults in the code for the
# size of the rotary slice.
PLAIN_FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
)


@dataclass(frozen=True)
class RopeFacts:
    layout: str = "none"
    rotary_dim: int = 0
    offset: int = 0
    attention_factor: float = 1.0
    inv_freq: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """A parsed config.json."""

    path: Path
    text: str
    values: dict

    @staticmethod
    def read(path: Path) -> "ModelConfig":
        try:
            text = path.read_text(encoding="utf-8")
            values = json.loads(text)
        except OSError as error:
            raise bad_input(f"{path}: cannot read: {error.strerror}") from error
        except ValueError as error:
            raise bad_input(f"{path}: not valid JSON: {str(error).splitlines()[0]}") from error
        if not isinstance(values, dict):
            raise bad_input(f"{path}: expected a JSON object")
        return ModelConfig(path, text, values)

    @property
    def rope_parameters(self) -> dict:
        """The RoPE parameters: `rope_parameters` of transformers 5, else `rope_scaling` and `rope_theta` of earlier
        versions."""
        old = self.values.get("rope_scaling") or {}
        merged = {
            "rope_theta": self.values.get("rope_theta"),
            "rope_type": old.get("rope_type", old.get("type", "default")),
            "partial_rotary_factor": self.values.get("partial_rotary_factor", 1.0),
        } | old
        return merged | (self.values.get("rope_parameters") or {})

    @property
    def rope_layout(self) -> str | None:
        """Layout of the rotary pairs; None if config.json does not tell it, or if the layout depends on the inference
        engine."""
        model_type = self.values.get("model_type")
        return FAMILIES[model_type].rope_layout if model_type in PLAIN_FAMILIES else None

    def sliding_window(self, layer: int) -> int:
        """The sliding window of a layer; 0: none."""
        window = self.values.get("sliding_window") or 0
        types = self.values.get("layer_types")
        if not self.values.get("use_sliding_window", True):
            return 0
        slides = types is None or (layer < len(types) and types[layer] == "sliding_attention")
        return window if slides else 0

    def frequencies(self) -> tuple[np.ndarray, float]:
        """(inv_freq, attention factor), scaling included. transformers computes every type but plain RoPE."""
        parameters = self.rope_parameters
        if parameters["rope_type"] == "default":
            return plain_frequencies(parameters["rope_theta"], self.rotary_dim()), 1.0
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if parameters["rope_type"] not in ROPE_INIT_FUNCTIONS or parameters["rope_type"] in ("dynamic", "longrope"):
            raise unsupported(
                f"{self.path}: rope_type '{parameters['rope_type']}' depends on the length or is unknown",
                "supported: default and every type of transformers that does not depend on the length",
            )
        inv_freq, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](AutoConfig.for_model(**self.values))
        return inv_freq.double().numpy(), float(factor)

    def rotary_dim(self) -> int:
        head_dim = self.values.get("head_dim") or self._size("hidden_size") // self._size("num_attention_heads")
        return int(head_dim * self.rope_parameters["partial_rotary_factor"])

    def _size(self, key: str) -> int:
        value = self.values.get(key)
        if type(value) is not int or value < 1:
            raise bad_input(f"{self.path}: {key}: expected a positive integer, found {value!r}")
        return value


def plain_frequencies(theta: float | None, rotary_dim: int) -> np.ndarray:
    """[rotary_dim / 2]: theta^(-2j / rotary_dim)"""
    if theta is None:
        raise bad_input("config.json: rope_theta is missing", "name it with --rope-theta")
    return float(theta) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
