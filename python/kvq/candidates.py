"""What perplexity.py measures: artifacts, and schemes by name."""

from dataclasses import dataclass
from pathlib import Path

from .artifact import SidePlan
from .artifact_reader import load_artifact
from .builtin_schemes import BuiltinPlans
from .coded_attention import ArtifactPlans, Windows
from .errors import bad_input
from .fingerprint import model_fingerprint


@dataclass
class Candidate:
    """`plan_of(layer, side, kv_heads, dim)` gives the plan of a side, or None for what stays exact."""

    name: str
    kind: str  # exact, scheme, artifact
    source: str  # path of the artifact, or name of the scheme
    plan_of: object
    windows: Windows
    manifest: dict | None = None

    @property
    def has_trellis(self) -> bool:
        return self.manifest is not None and "trellis" in self.manifest.get("requires", ())

    def bytes_per_token(self, layers: dict[int, tuple[int, int, int]]) -> int:
        """Bytes of a coded token in the pages of all layers: keys and values of every KV head. layers: of GeometryProbe

        Raises what plan_of raises for an artifact that does not fit the model.
        """
        total = 0
        for layer, (kv_heads, *dims) in layers.items():
            for side, dim in zip("kv", dims):
                plan = self.plan_of(layer, side, kv_heads, dim)
                total += kv_heads * (2 * dim if plan is None else bytes_of_row(plan))
        return round(total)

    def uncovered(self, layers) -> list[int]:
        """Layers of the model that the artifact does not have."""
        if self.manifest is None:
            return []
        covered = {entry["layer"] for entry in self.manifest["layers"]}
        return [layer for layer in sorted(layers) if layer not in covered]


def bytes_of_row(plan) -> float:
    """Of an artifact in pages; of other schemes as they pack rows."""
    return plan.page_row_bytes if isinstance(plan, SidePlan) else plan.row_bytes


def open_candidates(args, model_folder: Path) -> list[Candidate]:
    """All candidates, in the order of the command line. Raises for an artifact of another model."""
    own = Fingerprint(model_folder)
    names = distinct_names([source for _, source in args.candidates])
    found = []
    for (kind, source), name in zip(args.candidates, names):
        found.append(open_artifact(args, source, name, own) if kind == "artifact" else open_scheme(args, source, name))
    return found


def open_scheme(args, source: str, name: str) -> Candidate:
    windows = args.windows if isinstance(args.windows, tuple) and source != "exact" else (0, 0)
    with_windows = args.windows == "artifact"  # a scheme's own windows, such as KIVI's residual
    plans = BuiltinPlans(source, args.only or "kv", args.unrounded_metadata, with_windows)
    return Candidate(name, "exact" if source == "exact" else "scheme", source, plans, Windows(*windows))


def open_artifact(args, source: str, name: str, own: "Fingerprint") -> Candidate:
    artifact = load_artifact(Path(source))
    claimed = artifact.manifest["model"].get("fingerprint", "")
    if claimed and not args.ignore_fingerprint and claimed != own.value:
        raise bad_input(
            f"{source}: expected model {claimed[:16]}, {own.folder} is {own.value[:16]}",
            "--ignore-fingerprint uses it all the same",
        )
    windows = {"artifact": (artifact.sink_tokens, artifact.recent_tokens), "none": (0, 0)}.get(
        args.windows, args.windows
    )
    plans = ArtifactPlans(artifact, args.only or "kv", args.unrounded_metadata)
    return Candidate(name, "artifact", source, plans, Windows(*windows), artifact.manifest)


class Fingerprint:
    """The model's fingerprint, computed when it is first asked for, because it reads all weights."""

    def __init__(self, folder: Path):
        self.folder, self._value = folder, None

    @property
    def value(self) -> str:
        if self._value is None:
            self._value = model_fingerprint(self.folder)
        return self._value


def distinct_names(sources: list[str]) -> list[str]:
    """Names as in kvq-eval: files without folder and ending, or whole paths where two would be equal."""
    short = [Path(source).name.removesuffix(".safetensors") for source in sources]
    return [source if short.count(name) > 1 else name for source, name in zip(sources, short)]
