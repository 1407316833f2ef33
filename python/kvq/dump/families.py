"""The models that `dump_qkv.py` was tried on, and what it assumes of the others.

Head counts, dimensions, softmax scale, soft cap, learned sinks and sliding window are read from what the attention
interface receives; the rotary frequencies from the model's rotary embedding; projections, norms and layers without RoPE
are found by their parts (survey.py). What is left is a fact of the code that rotates: which two channels form a pair
*in the tensors that enter attention*. For the models of the table it was read off `apply_rotary_pos_emb` in
transformers 5; other models are tried with every layout. The RoPE check (validators.py) proves the layout again on
every dump.

Three cases need care:

- GLM and GLM-4 rotate neighbors (2i, 2i+1), and only the first half of a head; GLM-4.5 (glm4_moe) rotates halves.
- DeepSeek-V2 rotates neighbors and leaves them in place.
- DeepSeek-V3 stores its weights for neighbors too (`rope_interleave`), but its rotation writes the result as halves:
  what enters attention, and so the dump, is `half`. The projection's output is still `interleaved`.
"""

from dataclasses import dataclass

from ..errors import EXIT_INPUT, EXIT_UNSUPPORTED, KvqError

# (layout in q and k, layout in the projections' output if it is another)
ANY_LAYOUTS = [
    ("none", None),
    ("half", None),
    ("interleaved", None),
    ("half", "interleaved"),
    ("interleaved", "half"),
]


@dataclass(frozen=True)
class Family:
    """One row of the table below, or a model that the table does not know.

    `rope_layout` is the layout of rotary pairs in the captured tensors. `projection_layout` is the layout in the
    projections' output, if a model with `rope_interleave` has another layout there.
    """

    label: str
    kind: str = "gqa"
    rope_layout: str = "half"
    projection_layout: str | None = None
    is_known: bool = True

    def layouts(self) -> list[tuple[str, str | None]]:
        """As in ANY_LAYOUTS, of all tries; the first that fits counts."""
        if self.is_known:
            moved = [(self.rope_layout, self.projection_layout)] if self.projection_layout else []
            return [("none", None), *moved, (self.rope_layout, None)]
        return ANY_LAYOUTS


def _gqa(**labels: str) -> dict[str, Family]:
    return {model_type: Family(label) for model_type, label in labels.items()}


def _interleaved(**labels: str) -> dict[str, Family]:
    return {model_type: Family(label, rope_layout="interleaved") for model_type, label in labels.items()}


# Labels of a multimodal model name its text half, because a dump is made of that.
FAMILIES = {
    **_gqa(
        llama="Llama",
        mistral="Mistral",
        mistral3="Mistral 3, text half",
        mixtral="Mixtral",
        ministral="Ministral",
        ministral3="Ministral 3",
        qwen2="Qwen2",
        qwen2_moe="Qwen2-MoE",
        qwen3="Qwen3",
        qwen3_moe="Qwen3-MoE",
        qwen3_vl="Qwen3-VL, text half",
        qwen3_next="Qwen3-Next, attention layers",
        qwen3_5="Qwen3.5, attention layers of the text half",
        qwen3_5_text="Qwen3.5 text, attention layers",
        glm4_moe="GLM-4.5",
        gemma="Gemma",
        gemma2="Gemma 2",
        gemma3="Gemma 3, text half",
        gemma3_text="Gemma 3 text",
        gemma4_text="Gemma 4 text",
        gpt_oss="GPT-OSS",
        gpt_neox="GPT-NeoX",
        gpt2="GPT-2",
        phi="Phi",
        phi3="Phi-3",
        olmo2="OLMo 2",
        olmo3="OLMo 3",
        olmoe="OLMoE",
        granite="Granite",
        granitemoe="Granite-MoE",
        smollm3="SmolLM3",
        exaone4="EXAONE 4",
        seed_oss="Seed-OSS",
        arcee="Arcee",
        nemotron="Nemotron",
        starcoder2="StarCoder2",
        stablelm="StableLM",
        apertus="Apertus",
        bitnet="BitNet",
        hunyuan_v1_dense="Hunyuan",
        minimax="MiniMax, attention layers",
        minimax_m2="MiniMax-M2",
        lfm2="LFM2, attention layers",
        jamba="Jamba, attention layers",
        bamba="Bamba, attention layers",
        falcon_h1="Falcon-H1, attention",
    ),
    **_interleaved(
        glm="GLM",
        glm4="GLM-4",
        cohere="Command R",
        cohere2="Command R7B",
        ernie4_5="ERNIE 4.5",
        ernie4_5_moe="ERNIE 4.5-MoE",
        helium="Helium",
        llama4_text="Llama 4 text",
    ),
    "deepseek_v2": Family("DeepSeek-V2", kind="mla_rope", rope_layout="interleaved"),
    "deepseek_v3": Family("DeepSeek-V3", kind="mla_rope", projection_layout="interleaved"),
    "glm4_moe_lite": Family("GLM-4.7-Flash", kind="mla_rope", projection_layout="interleaved"),
}


def supported_list() -> str:
    return f"{', '.join(sorted(FAMILIES))}; other models are tried, and refused if q, k or attention cannot be redone"


def family_of(config: dict, where: str) -> Family:
    """The family of a parsed `config.json`, by its own type or that of its text half; for a type that is not in the
    table, a Family that is not known."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise KvqError(
            EXIT_INPUT, f"{where}: expected a 'model_type', found {'none' if model_type is None else 'no text'}"
        )
    text = config.get("text_config")
    text_type = text.get("model_type") if isinstance(text, dict) else None
    return FAMILIES.get(model_type) or FAMILIES.get(text_type) or Family(model_type, is_known=False)


def refuse_inexpressible(config, family: Family) -> None:
    """Refuses models whose attention is not causal, because a dump is. Takes the transformers configuration of the text
    half."""
    if getattr(config, "use_bidirectional_attention", None) is True:
        raise KvqError(
            EXIT_UNSUPPORTED,
            f"{family.label} with bidirectional attention is not supported: a dump is causal",
            f"supported: {supported_list()}",
        )
