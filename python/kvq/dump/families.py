"""The models `dump_qkv.py` knows, and what no tensor shape can tell about them.

Head counts, dimensions, softmax scale and sliding window are read from what the attention interface receives; the
rotary frequencies from the model's rotary embedding. What is left are facts of the code that rotates: which two
channels form a pair *in the tensors that enter attention*, and whether the layer is MLA. They were read off
`apply_rotary_pos_emb` of each model in transformers 5; the RoPE check (validators.py) proves them again on every dump.

Three cases need care:

- GLM and GLM-4 rotate neighbors (2i, 2i+1), and only the first half of a head; GLM-4.5 (glm4_moe) rotates halves.
- DeepSeek-V2 rotates neighbors and leaves them in place.
- DeepSeek-V3 stores its weights for neighbors too (`rope_interleave`), but its rotation writes the result as halves:
  what enters attention, and so the dump, is `half`. The projection's output is still `interleaved`.
"""

from dataclasses import dataclass

from ..errors import EXIT_INPUT, EXIT_UNSUPPORTED, KvqError


@dataclass(frozen=True)
class Family:
    """One row of the table below.

    `rope_layout` is the layout of rotary pairs in the captured tensors. `projection_layout` is the layout in the
    projections' output, if a model with `rope_interleave` has another layout there.
    """

    label: str
    kind: str = "gqa"
    rope_layout: str = "half"
    projection_layout: str | None = None
    query_projections: tuple[str, ...] = ("q_proj",)
    key_projection: str = "k_proj"

    def layout_before_rope(self, config) -> str | None:
        """Layout of the rotary pairs in the projections' output if RoPE moves the pairs; None if the pairs stay in
        place."""
        return self.projection_layout if getattr(config, "rope_interleave", False) else None

    def projections(self, attention) -> dict[str, object]:
        """{"q": module, "k": module}: the modules whose output becomes q and k through QK-norm, if any, and RoPE."""
        candidates = [getattr(attention, name, None) for name in self.query_projections]
        query = next(module for module in candidates if module is not None)
        return {"q": query, "k": getattr(attention, self.key_projection)}


def _mla(label: str, **layouts: str) -> Family:
    """MLA: queries come from `q_b_proj` if the projection is low-rank; the projection to the latent gives the shared
    rotary key."""
    return Family(
        label, kind="mla_rope", query_projections=("q_b_proj", "q_proj"), key_projection="kv_a_proj_with_mqa", **layouts
    )


FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "qwen3_moe": Family("Qwen3-MoE"),
    "glm": Family("GLM", rope_layout="interleaved"),
    "glm4": Family("GLM-4", rope_layout="interleaved"),
    "glm4_moe": Family("GLM-4.5"),
    "gemma": Family("Gemma"),
    "gemma2": Family("Gemma 2"),
    "gemma3_text": Family("Gemma 3 text"),
    "deepseek_v2": _mla("DeepSeek-V2", rope_layout="interleaved"),
    "deepseek_v3": _mla("DeepSeek-V3", rope_layout="half", projection_layout="interleaved"),
}


def supported_list() -> str:
    return ", ".join(f"{family.label} ({model_type})" for model_type, family in FAMILIES.items())


def family_of(config: dict, where: str) -> Family:
    """The family of a parsed `config.json`; raises a KvqError that lists the supported families if there is none."""
    model_type = config.get("model_type")
    if model_type is None:
        raise KvqError(EXIT_INPUT, f"{where}: expected a 'model_type', found none")
    if model_type not in FAMILIES:
        raise KvqError(
            EXIT_UNSUPPORTED, f"{where}: model type '{model_type}' is not supported", f"supported: {supported_list()}"
        )
    return FAMILIES[model_type]


def refuse_inexpressible(config, family: Family) -> None:
    """Refuses models that a dump cannot describe: logits other than `softmax_scale * q.k`, attention that is not
    causal.

    Takes the transformers configuration, not the JSON, because the softcap of Gemma 2 is a default that a file need not
    mention.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        raise KvqError(
            EXIT_UNSUPPORTED,
            f"{family.label} with attention logit soft-capping ({softcap}) is not supported: a dump cannot express it",
            'a model trained without it has "attn_logit_softcapping": null in config.json',
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise KvqError(
            EXIT_UNSUPPORTED,
            f"{family.label} with bidirectional attention is not supported: a dump is causal",
            f"supported: {supported_list()}",
        )
