"""A two-layer model of every family dump_qkv.py supports, with random weights and awkward geometry.

Nothing follows from anything else: head_dim is not hidden / heads, heads are not powers of two, rotary slices are
partial, scales are odd. Norm weights are random, so that a forgotten norm shows; projections are large enough for
attention to be far from uniform, so that a wrong scale, window or head order shows.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

COMMON = dict(
    vocab_size=89,
    hidden_size=48,
    intermediate_size=32,
    num_hidden_layers=2,
    max_position_embeddings=512,
    initializer_range=0.15,
    bos_token_id=3,
    eos_token_id=4,
    pad_token_id=5,
)
GQA = dict(num_attention_heads=6, num_key_value_heads=2, head_dim=20)
EXPERTS = dict(moe_intermediate_size=16, num_experts_per_tok=2)
MLA = dict(
    num_attention_heads=3,
    num_key_value_heads=3,
    kv_lora_rank=10,
    qk_nope_head_dim=14,
    qk_rope_head_dim=12,
    v_head_dim=18,
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    **EXPERTS,
)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


@dataclass(frozen=True)
class TinyModel:
    """A configuration, and the facts that a dump of its model must state."""

    config_class: str
    options: dict
    layout: str = "half"
    rotary_dim: int = 20
    windows: tuple[int, int] = (0, 0)
    norms: bool = False
    softmax_scale: float = 20**-0.5
    attributes: dict = field(default_factory=dict)

    @property
    def is_mla(self) -> bool:
        return "kv_lora_rank" in self.options


def _yarn_scale(logit_dim: int) -> float:
    """DeepSeek multiplies the scale by the square of YaRN's mscale."""
    return logit_dim**-0.5 * (0.1 * torch.log(torch.tensor(4.0)).item() + 1.0) ** 2


TINY_MODELS = {
    "llama": TinyModel(
        "LlamaConfig",
        {
            **GQA,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": TinyModel("MistralConfig", {**GQA, "sliding_window": 7}, windows=(7, 7)),
    "qwen2": TinyModel(
        "Qwen2Config", {**GQA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, windows=(0, 5)
    ),
    "qwen3": TinyModel("Qwen3Config", {**GQA, "rope_parameters": YARN}, norms=True),
    "qwen3_moe": TinyModel("Qwen3MoeConfig", {**GQA, **EXPERTS, "num_experts": 4}, norms=True),
    "glm": TinyModel("GlmConfig", {**GQA}, layout="interleaved", rotary_dim=10),
    "glm4": TinyModel(
        "Glm4Config",
        {**GQA, "head_dim": 24, "num_key_value_heads": 3},
        layout="interleaved",
        rotary_dim=12,
        softmax_scale=24**-0.5,
    ),
    "glm4_moe": TinyModel(
        "Glm4MoeConfig",
        {**GQA, **EXPERTS, "n_routed_experts": 4, "use_qk_norm": True, "first_k_dense_replace": 1},
        rotary_dim=10,
        norms=True,
    ),
    "gemma": TinyModel("GemmaConfig", {**GQA, "num_key_value_heads": 1}),
    "gemma2": TinyModel(
        "Gemma2Config",
        {**GQA, "attn_logit_softcapping": None, "sliding_window": 9, "query_pre_attn_scalar": 31},
        windows=(9, 0),
        softmax_scale=31**-0.5,
    ),
    "gemma3_text": TinyModel(
        "Gemma3TextConfig",
        {
            **GQA,
            "sliding_window": 6,
            "query_pre_attn_scalar": 17,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        windows=(6, 0),
        norms=True,
        softmax_scale=17**-0.5,
    ),
    "deepseek_v2": TinyModel(
        "DeepseekV2Config", {**MLA, "q_lora_rank": None}, layout="interleaved", rotary_dim=12, softmax_scale=26**-0.5
    ),
    "deepseek_v3": TinyModel(
        "DeepseekV3Config",
        {
            **MLA,
            "q_lora_rank": 16,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
        rotary_dim=12,
        softmax_scale=_yarn_scale(26),
    ),
    "deepseek_v3_half": TinyModel(
        "DeepseekV3Config",
        {**MLA, "q_lora_rank": None, "n_group": 2, "topk_group": 1, "rope_interleave": False},
        rotary_dim=12,
        softmax_scale=26**-0.5,
    ),
}


def save_model(config, folder: Path, seed: int = 1) -> Path:
    """Saves a model of this configuration with random weights as a Hugging Face folder."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj")):
            parameter.data *= 2
    model.save_pretrained(folder)
    return folder


def save_tiny(name: str, folder: Path, **changes) -> Path:
    tiny = TINY_MODELS[name]
    config = getattr(transformers, tiny.config_class)(**{**COMMON, **tiny.options, **changes})
    return save_model(config, folder)
