"""The tuned kernels that lib/kvq/runtime/variants.json lists: a second reading of the list."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tuned_kernels(few: bool = False) -> dict[str, list[dict]]:
    """Kernels by verb. With `few` only those of builds with KVQ_KERNELS=few."""
    table = json.loads((ROOT / "lib/kvq/runtime/variants.json").read_text())
    kernels: dict[str, list[dict]] = {"decode": [], "quantize_write": [], "dequantize": [], "prefill": []}
    for row in table["formats"]:
        sides = {key: row[key] for key in ("head_dim", "k", "v")}
        for activation in row["activations"]:
            tested = row.get("tests", []) if row.get("few") else []
            heads = [n for n in row["heads"] if not few or f"h{n}_{activation}" in tested]
            kernels["decode"] += [{**sides, "heads": n, "activation": activation} for n in heads]
            verbs = row.get("verbs", list(kernels)) if heads else []
            if "quantize_write" in verbs:
                kernels["quantize_write"].append({**sides, "activation": activation})
            if "dequantize" in verbs:
                kernels["dequantize"].append({**sides, "activation": activation})
                attention = {"head_dim": row["head_dim"], "activation": activation}
                if row["head_dim"] in table["attention_head_dims"] and attention not in kernels["prefill"]:
                    kernels["prefill"].append(attention)
    return kernels
