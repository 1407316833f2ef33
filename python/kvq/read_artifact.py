"""Reads a kvq artifact (formats/artifact.md) independently of the C++ library, and says what is in it."""

import argparse
import json
import sys
from pathlib import Path

from .cli import Parser, run_script
from .errors import EXIT_CHECK_FAILED, EXIT_DONE, KvqError, bad_input, usage
from .files import atomic_path

PROGRAM = "read_artifact.py"
EPILOG = """\
examples

  read_artifact.py out.safetensors                 what is in it, one line per layer and side
  read_artifact.py out.safetensors --verify        and check content hash, all that the file says twice, and golden
                                                   rows
  read_artifact.py out.safetensors --encode-rows k.npy --layer 3 --side k --head 0
                                                   the packed bytes of rows [N, D] of that head, in hex, one a line

rows [Hkv, N, D] are those of all heads, of which --head is coded: centroids of scope `joint` need them

exit codes: 0 done, 2 wrong flags, 3 malformed file, 5 unsupported version or feature, 6 a check of --verify failed
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(PROGRAM, __doc__, EPILOG)
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="the safetensors file")
    parser.add_argument("--verify", action="store_true", help="make every check; exit code 6 if one fails")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    rows = parser.add_argument_group("coding rows")
    rows.add_argument(
        "--encode-rows",
        metavar="IN.npy",
        type=Path,
        help="float32 rows [N, D], or [Hkv, N, D], before centering and rotation",
    )
    rows.add_argument("--layer", metavar="L", type=int)
    rows.add_argument("--side", choices=["k", "v"])
    rows.add_argument("--head", metavar="H", type=int, default=0, help="KV head (default 0)")
    rows.add_argument(
        "--output", metavar="OUT.npy", type=Path, help="write uint8 [N, row_bytes] there, in place of hex"
    )
    args = parser.parse_args(argv)
    if args.encode_rows and (args.layer is None or args.side is None):
        parser.error("--encode-rows needs --layer and --side")
    if args.encode_rows and (args.json or args.verify):
        parser.error("--encode-rows goes without --json and --verify")
    return args


# Contents


def side_summary(layer: int, side: str, plan, facts: dict) -> dict:
    """One row of the table and of `layers` in the JSON document. `facts` is the plan in the manifest."""
    scheme = plan.scheme
    row = {
        "layer": layer,
        "side": side,
        "dim": plan.dim,
        "coder": scheme.coder,
        "bits": scheme.bits,
        "row_bytes": plan.row_bytes,
    }
    if "channel_bits" in plan.tensors:
        row |= width_summary(plan.tensors["channel_bits"]) | {"unit": facts["allocation"]["unit"]}
        row |= {"scale_scope": "row"} if scheme.one_scale else {}
    elif scheme.coder != "exact":
        row |= {"group_size": scheme.group_size}
    if scheme.coder != "exact":
        row |= {"scale_type": scheme.scale_type, "scale_rule": scheme.scale_rule}
    if plan.clip_ratio:
        row |= {"zero": scheme.zero, "clip_ratio": list(plan.clip_ratio)}
    row |= {name: facts[name] for name in ("codebooks", "trellis") if name in facts}
    if plan.centroid_scope:
        row |= {"centroids": {"count": scheme.centroids, "scope": plan.centroid_scope}}
    if plan.transform:
        row |= {"transform": facts["transform"]}
    return row | {
        "center": "center" in plan.tensors,
        "rotation": plan.kind,
        "scope": plan.scope,
        "recipe": plan.recipe,
        "order": plan.order,
    }


def width_summary(channel_bits) -> dict:
    """Widths of mixed rows over all heads and channels: the mean, and how many channels have each width."""
    widths = channel_bits.ravel().tolist()
    return {
        "mean_bits": sum(widths) / len(widths),
        "widths": {str(width): widths.count(width) for width in sorted(set(widths), reverse=True)},
    }


def summaries(artifact) -> list[dict]:
    facts = {entry["layer"]: entry for entry in artifact.manifest["layers"]}
    return [
        side_summary(layer, side, plan, facts[layer][side])
        for layer, entry in artifact.layers.items()
        for side, plan in entry.sides.items()
    ]


def describe_head(artifact) -> list[str]:
    manifest = artifact.manifest
    model, calibration = manifest["model"], manifest["calibration"]
    dump = calibration.get("dump", {})
    return [
        f"format       {manifest['format']} {manifest['version']}",
        f"model        {model.get('name', '?')}, {model['num_layers']} layers, "
        f"fingerprint {model.get('fingerprint', '')[:16] or 'none'}",
        f"calibration  {calibration.get('method', '?')} by {calibration.get('tool', '?')}, "
        f"{calibration.get('tokens', '?')} tokens in {calibration.get('sequences', '?')} sequences, "
        f"seed {calibration.get('seed', '?')}",
        f"dump         {dump.get('producer', '?')}, {dump.get('capture_point', '?')}, {dump.get('hash', '?')}",
        f"windows      sink {artifact.sink_tokens}, recent {artifact.recent_tokens} tokens",
    ]


def table_row(row: dict) -> list[str]:
    coder = row["coder"] + (f" {row['zero']}" if "zero" in row else "")
    coder += "".join(f" {item['bits']}m{item['memory']}" for item in row.get("trellis", []))
    bits = f"{row['mean_bits']:.2f}" if "widths" in row else str(row["bits"])
    group = "mixed" if "widths" in row else str(row.get("group_size", "-"))
    ratios = sorted(set(row.get("clip_ratio", [])))
    clip = "-" if ratios in ([], [1.0]) else "..".join(f"{r:g}" for r in dict.fromkeys((ratios[0], ratios[-1])))
    rotation = row["rotation"] + (f" {row['order']}" if row["rotation"] == "block_hadamard" else "")
    if "transform" in row:
        rotation += f" {row['transform']['kind']}"
    center = "yes" if row["center"] else "no"
    if "centroids" in row:
        center = f"{row['centroids']['count']} {row['centroids']['scope']}"
    return [
        str(row["layer"]),
        row["side"],
        coder,
        bits,
        group,
        row.get("scale_type", "-") + ("/row" if "scale_scope" in row else ""),
        row.get("scale_rule", "-"),
        str(row["row_bytes"]),
        clip,
        center,
        rotation,
        row["scope"],
        row["recipe"],
    ]


def format_table(rows: list[list[str]]) -> list[str]:
    header = "layer side coder bits group scale rule bytes clip center rotation scope recipe".split()
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (header, *rows)]


def describe_widths(rows: list[dict]) -> list[str]:
    """The histogram of each plan with mixed rows, in percent of the channels of all heads."""
    lines = []
    for row in rows:
        if "widths" in row:
            total = sum(row["widths"].values())
            shares = ", ".join(f"{width}: {count / total:.1%}" for width, count in row["widths"].items())
            lines.append(f"{row['layer']} {row['side']} by {row['unit']}  {shares}")
    return ["widths"] + lines if lines else []


def make_checks(artifact) -> list:
    from .verify import verify_artifact

    return verify_artifact(artifact)


# Encoding rows


def load_rows(path: Path, dim: int, heads: int):
    import numpy as np

    try:
        rows = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise bad_input(f"{path}: cannot read as .npy: {str(error).splitlines()[0]}") from error
    fits = rows.ndim == 2 or (rows.ndim == 3 and len(rows) == heads)
    if rows.dtype != np.float32 or not fits or rows.shape[-1] != dim:
        raise bad_input(
            f"{path}: expected float32 [N, {dim}] or [{heads}, N, {dim}], found {rows.dtype} {list(rows.shape)}"
        )
    if not np.isfinite(rows).all():
        raise bad_input(f"{path}: expected finite numbers")
    return rows


def encode_rows(args, artifact) -> None:
    import numpy as np

    layer = artifact.layers.get(args.layer)
    if layer is None or args.side not in layer.sides:
        known = ", ".join(f"{index} {'/'.join(entry.sides)}" for index, entry in artifact.layers.items())
        raise usage(f"--layer {args.layer} --side {args.side}: not in the artifact", f"it has {known}")
    if not 0 <= args.head < layer.num_kv_heads:
        raise usage(f"--head: expected 0 to {layer.num_kv_heads - 1}, found {args.head}")
    plan = layer.sides[args.side]
    rows = load_rows(args.encode_rows, plan.dim, layer.num_kv_heads)
    packed = plan.pack_rows(rows, args.head) if rows.ndim == 2 else plan.pack_heads(rows)[args.head]
    if args.output:
        with atomic_path(args.output) as temporary, temporary.open("wb") as file:
            np.save(file, packed)
    else:
        print("\n".join(row.tobytes().hex() for row in packed))


# Main


def print_json(args, artifact, checks: list[dict]) -> None:
    document = {
        "format": "kvq-artifact-report",
        "version": "1.0",
        "file": str(args.artifact),
        "manifest": artifact.manifest,
        "layers": summaries(artifact),
        "tensors": {
            name: {"dtype": info.dtype, "shape": list(info.shape)} for name, info in artifact.file.tensors.items()
        },
    }
    print(json.dumps(document | ({"checks": [vars(item) for item in checks]} if args.verify else {}), indent=2))


def print_text(artifact, checks: list[dict]) -> None:
    print("\n".join(describe_head(artifact)))
    rows = summaries(artifact)
    print("\n" + "\n".join(format_table([table_row(row) for row in rows])))
    if widths := describe_widths(rows):
        print("\n" + "\n".join(widths))
    if checks:
        print()
    for item in checks:
        print(f"{item.name}: {'ok' if item.passed else 'FAILED'}: {item.detail}")


def run(args) -> int:
    from .artifact_reader import load_artifact

    artifact = load_artifact(args.artifact, check_hash=not args.verify)  # --verify reports the hash among its checks
    if args.encode_rows:
        encode_rows(args, artifact)
        return EXIT_DONE
    checks = make_checks(artifact) if args.verify else []
    print_json(args, artifact, checks) if args.json else print_text(artifact, checks)
    failed = [item for item in checks if not item.passed]
    if failed:
        raise KvqError(EXIT_CHECK_FAILED, f"{args.artifact}: {failed[0].name}: {failed[0].detail}")
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_script(PROGRAM, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
