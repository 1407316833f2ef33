"""One tiny random model of each architecture that dump_qkv.py was tried on: 64 channels, few layers, vocabulary 64.

Nothing is special about the numbers but that heads are of 16 to 32 channels, layers of every type of the architecture
occur, windows are shorter than the sequences, and random norms and large projections make every mistake show.
"""

import contextlib
import io
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import torch
import transformers

from kvq.dump import program

COMMON = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.15,
    bos_token_id=3,
    eos_token_id=4,
    pad_token_id=5,
)
EXPERTS = dict(moe_intermediate_size=16, num_experts_per_tok=2, num_experts=4, num_local_experts=4)
NO_HEAD_DIM = dict(head_dim=None)
MLA = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    **EXPERTS,
)
MAMBA = dict(mamba_d_state=8, mamba_d_conv=2, mamba_n_heads=8, mamba_d_head=16, mamba_chunk_size=8, mamba_d_ssm=128)
LINEAR = dict(
    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, **EXPERTS
)
SLIDING_THEN_FULL = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])
LINEAR_THEN_FULL = dict(layer_types=["linear_attention", "full_attention"])
VISION = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
    depth=1,
    num_heads=2,
    out_hidden_size=64,
    deepstack_visual_indexes=[0],
)


@dataclass(frozen=True)
class Architecture:
    """A row of docs/models.md. `options` go over COMMON, into `text_config` if `multimodal`."""

    config_class: str
    options: dict = field(default_factory=dict)
    multimodal: dict | None = None

    def config(self):
        """The configuration; None if the installed transformers has no such class."""
        kind = getattr(transformers, self.config_class, None)
        if kind is None:
            return None
        options = {**COMMON, **self.options}
        if options["head_dim"] is None:
            del options["head_dim"]
        if self.multimodal is None:
            return kind(**options)
        return kind(text_config=options, **self.multimodal)


ARCHITECTURES = {
    "llama": Architecture("LlamaConfig"),
    "mistral": Architecture("MistralConfig", {"sliding_window": 7}),
    "mixtral": Architecture("MixtralConfig", EXPERTS),
    "ministral": Architecture("MinistralConfig", SLIDING_THEN_FULL),
    "ministral3": Architecture("Ministral3Config"),
    "mistral3": Architecture(
        "Mistral3Config", {"model_type": "mistral"}, {"vision_config": {**VISION, "model_type": "pixtral"}}
    ),
    "qwen2": Architecture("Qwen2Config"),
    "qwen2_moe": Architecture("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": Architecture("Qwen3Config"),
    "qwen3_moe": Architecture("Qwen3MoeConfig", EXPERTS),
    "qwen3_vl": Architecture(
        "Qwen3VLConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}},
        {"vision_config": VISION},
    ),
    "qwen3_next": Architecture(
        "Qwen3NextConfig", {**LINEAR, **LINEAR_THEN_FULL, "shared_expert_intermediate_size": 16}
    ),
    "qwen3_5_text": Architecture("Qwen3_5TextConfig", {**LINEAR, **LINEAR_THEN_FULL}),
    "glm": Architecture("GlmConfig"),
    "glm4": Architecture("Glm4Config"),
    "glm4_moe": Architecture("Glm4MoeConfig", {**EXPERTS, "n_routed_experts": 4, "use_qk_norm": True}),
    "glm4_moe_lite": Architecture("Glm4MoeLiteConfig", MLA),
    "deepseek_v2": Architecture("DeepseekV2Config", {**MLA, "q_lora_rank": None}),
    "deepseek_v3": Architecture("DeepseekV3Config", MLA),
    "gemma": Architecture("GemmaConfig"),
    "gemma2": Architecture("Gemma2Config", {**SLIDING_THEN_FULL, "attn_logit_softcapping": 5.0}),
    "gemma3_text": Architecture("Gemma3TextConfig", SLIDING_THEN_FULL),
    "gemma3": Architecture("Gemma3Config", SLIDING_THEN_FULL, {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "gemma4_text": Architecture(
        "Gemma4TextConfig",
        {
            **SLIDING_THEN_FULL,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
        },
    ),
    "phi": Architecture("PhiConfig", {**NO_HEAD_DIM, "qk_layernorm": True}),
    "phi3": Architecture("Phi3Config", NO_HEAD_DIM),
    "gpt_oss": Architecture("GptOssConfig", {**EXPERTS, "sliding_window": 7}),
    "olmo2": Architecture("Olmo2Config", NO_HEAD_DIM),
    "olmo3": Architecture("Olmo3Config", {**NO_HEAD_DIM, **SLIDING_THEN_FULL}),
    "olmoe": Architecture("OlmoeConfig", {**NO_HEAD_DIM, **EXPERTS}),
    "granite": Architecture("GraniteConfig", {**NO_HEAD_DIM, "attention_multiplier": 0.3}),
    "granitemoe": Architecture("GraniteMoeConfig", {**NO_HEAD_DIM, **EXPERTS, "attention_multiplier": 0.3}),
    "cohere": Architecture("CohereConfig", {**NO_HEAD_DIM, "use_qk_norm": True}),
    "cohere2": Architecture("Cohere2Config", {**NO_HEAD_DIM, **SLIDING_THEN_FULL}),
    "smollm3": Architecture("SmolLM3Config", {**NO_HEAD_DIM, "no_rope_layers": [1, 0]}),
    "exaone4": Architecture("Exaone4Config", {**SLIDING_THEN_FULL, "sliding_window_pattern": 2}),
    "seed_oss": Architecture("SeedOssConfig"),
    "arcee": Architecture("ArceeConfig"),
    "nemotron": Architecture("NemotronConfig"),
    "starcoder2": Architecture("Starcoder2Config", NO_HEAD_DIM),
    "stablelm": Architecture("StableLmConfig", {**NO_HEAD_DIM, "qk_layernorm": True}),
    "apertus": Architecture("ApertusConfig"),
    "bitnet": Architecture("BitNetConfig", NO_HEAD_DIM),
    "ernie4_5": Architecture("Ernie4_5Config"),
    "ernie4_5_moe": Architecture("Ernie4_5_MoeConfig", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "helium": Architecture("HeliumConfig"),
    "hunyuan_v1_dense": Architecture("HunYuanDenseV1Config"),
    "minimax_m2": Architecture("MiniMaxM2Config", EXPERTS),
    "minimax": Architecture("MiniMaxConfig", {**EXPERTS, **LINEAR_THEN_FULL, "block_size": 8}),
    "lfm2": Architecture("Lfm2Config", {**NO_HEAD_DIM, "layer_types": ["conv", "full_attention"]}),
    "jamba": Architecture(
        "JambaConfig", {**MAMBA, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    ),
    "bamba": Architecture("BambaConfig", {**MAMBA, **NO_HEAD_DIM, "attn_layer_indices": [1]}),
    "falcon_h1": Architecture("FalconH1Config", {**MAMBA, "key_multiplier": 0.7}),
    "gpt2": Architecture("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_neox": Architecture("GPTNeoXConfig", NO_HEAD_DIM),
    "falcon": Architecture("FalconConfig", {**NO_HEAD_DIM, "alibi": False}),
    "llama4_text": Architecture("Llama4TextConfig", {**EXPERTS, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0]}),
    "internlm2": Architecture("InternLM2Config"),
}


# Why an architecture is refused; the test expects this in the message.
REFUSALS = {"falcon": "no layer calls the attention interface"}
ATTENTION_LAYERS = "only the layers with attention"
TEXT_HALF = "the text half of a multimodal model"
ROTARY_PART = "MLA: the rotary part of the key, not the latent"
NOTES = {
    "bitnet": "a norm follows attention: no o_proj metric",
    "qwen3_next": f"{ATTENTION_LAYERS}; gated: no o_proj metric",
    "qwen3_5_text": f"{ATTENTION_LAYERS}; gated: no o_proj metric",
    "minimax": ATTENTION_LAYERS,
    "lfm2": ATTENTION_LAYERS,
    "jamba": ATTENTION_LAYERS,
    "bamba": ATTENTION_LAYERS,
    "falcon_h1": "keys times a constant; the state-space half has no keys",
    "llama4_text": "up to 8192 tokens; chunks fail the checks",
    "mistral3": TEXT_HALF,
    "gemma3": TEXT_HALF,
    "qwen3_vl": TEXT_HALF,
    "glm4_moe_lite": ROTARY_PART,
    "deepseek_v2": ROTARY_PART,
    "deepseek_v3": ROTARY_PART,
    "internlm2": "remote code, which dump_qkv.py does not run",
}


def make_model(config, seed: int = 1):
    """A model with random weights, its norms and biases too, and projections that make attention far from uniform."""
    torch.manual_seed(seed)
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias") or "sinks" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            elif any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj", "qkv", "query_key")):
                parameter *= 2
    return model


@dataclass(frozen=True)
class Row:
    """What came of one architecture."""

    name: str
    code: int | None  # exit code of dump_qkv.py; None: no such class in transformers
    errors: str = ""
    rope: str = ""
    terms: str = ""  # windows, caps, sinks
    checked: str = ""

    @property
    def works(self) -> bool:
        return self.code == 0

    def line(self) -> str:
        """A line of the table in docs/models.md."""
        result = "yes" if self.works else "not in transformers" if self.code is None else "refused"
        note = REFUSALS.get(self.name) or NOTES.get(self.name, "")
        return f"| `{self.name}` | {result} | {self.rope} | {self.terms} | {self.checked} | {note} |"


def dump_architecture(name: str, folder: Path, tokens: int = 60, length: int = 23) -> Row:
    """Saves the tiny model in `folder` / "model" and dumps it to `folder` / "dump.h5"."""
    config = ARCHITECTURES[name].config()
    if config is None:
        return Row(name, None)
    make_model(config).save_pretrained(folder / "model")
    said = io.StringIO()
    argv = [folder / "model", "--output", folder / "dump.h5", "--sequence-length", length, "--threads", 1]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = program.main([*map(str, argv), "--synthetic-tokens", str(tokens)])
    if code != 0:
        return Row(name, code, said.getvalue())
    with h5py.File(folder / "dump.h5") as file:
        layers = [file[f"layers/{layer}"] for layer in sorted(file["layers"], key=int)]
        rope = ", ".join(dict.fromkeys(str(layer.attrs["rope_layout"]) for layer in layers))
        terms = {
            "window": any(layer.attrs["sliding_window"] for layer in layers),
            "soft cap": any("logit_softcapping" in layer.attrs for layer in layers),
            "sinks": any("sink_logits" in layer for layer in layers),
        }
    return Row(name, 0, "", rope, ", ".join(term for term, has in terms.items() if has), _checked(said.getvalue()))


def _checked(said: str) -> str:
    """The checks that had something to check."""
    names = {"QK-norm": "QK-norm", "RoPE": "RoPE", "attention output": "attention"}
    lines = [line for line in said.splitlines() if "the model has none" not in line and "not tested" not in line]
    return ", ".join(short for name, short in names.items() if any(f"check: {name}: ok" in line for line in lines))


def table(rows: list[Row]) -> str:
    head = "| architecture | dump | RoPE pairs | beside it | checked | note |\n|---|---|---|---|---|---|\n"
    return head + "".join(f"{row.line()}\n" for row in rows)
