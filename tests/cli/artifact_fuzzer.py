"""Random changes of artifacts that know the format: manifest, metadata, tensors, golden rows, container.

Most changed files get a right content hash and right words in the metadata, so that readers come to their deeper
checks. Each change is a function of (random, file) that changes the file and returns what it did.
"""

import json
import random
import struct
from collections.abc import Iterator

import numpy as np
from artifact_file import ArtifactFile, Tensor

JUNK = (
    *(None, True, False, "", "x", "I", [], {}, [1], {"a": 1}, "1.0", "\u0000", "é", "\U0001f600"),
    *(0, -1, 1, 2, 3, 4, 8, 9, 16, 17, 255, 1024, 1025, 4096, 4097, 2**30, 2**31, 2**40, 2**53, 2**63 - 1, 2**63),
    *(2**64 - 1, 2**64, 10**400, -(2**63), -(2**63) - 1, 0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-320, 1e300, 1e308),
)
VERSIONS = (
    "1.0",
    "1.1",
    "1.2",
    "1.3",
    "1.4",
    "1.5",
    "1.77",
    "2.0",
    "0.9",
    "1",
    "01.0",
    "1.02",
    "1.2.3",
    "1.",
    ".1",
    "1.10000",
    "x",
)
FEATURES = ("codebook", "trellis", "mixed_widths", "centroids", "transform")
NUMBERS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-30, 1e30, -1e30, 3e38, np.nan, np.inf, -np.inf, 1 + 2.0**-8)
SAME_SIZE = {"F32": ("I32", "U32"), "U16": ("F16", "BF16"), "U8": ("I8", "BOOL"), "I8": ("U8", "BOOL")}


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all values of a JSON document except the root."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def parent_of(tree: object, path: tuple) -> object:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def words_of(value: object) -> set[str]:
    if isinstance(value, str):
        return {value}
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(words_of, children))


class Fuzzer:
    """`seeds` are sound files by name."""

    def __init__(self, seeds: dict[str, ArtifactFile], seed: int):
        self.seeds, self.names = seeds, sorted(seeds)
        self.random = random.Random(seed)
        self.words = sorted(set().union(*(words_of(file.tree) for file in seeds.values())))
        self.changes = (
            *(self.replace, self.nudge, self.nudge, self.drop_value, self.add_value, self.swap_values, self.copy_value),
            *(self.metadata, self.flip_bit, self.put_number, self.scale, self.reorder, self.reorder),
            *(self.drop_tensor, self.add_tensor, self.reshape, self.relabel, self.cut_tensor, self.drop_golden),
            *(self.words_of_file, self.swap_sides, self.zero_tensor),
        )

    def make(self) -> tuple[str, bytes]:
        """(what was changed, the file)"""
        name = self.random.choice(self.names)
        file, done = self.seeds[name].copy(), [name]
        for _ in range(self.random.choice((1, 1, 1, 1, 2, 2, 3))):
            done.append(self.random.choice(self.changes)(file))
        fits_words, fits_hash = self.random.random() < 0.9, self.random.random() < 0.95
        if fits_words and not any(text.startswith("metadata") for text in done):
            file.fit_words()
        content = file.to_bytes(fits_hash)
        if self.random.random() < 0.06:
            text, content = self.damage(content)
            done.append(text)
        return "; ".join(done) + ("" if fits_words else "; words stay") + ("" if fits_hash else "; hash stays"), content

    # The manifest

    def place(self, file: ArtifactFile, wanted=lambda value: True) -> tuple | None:
        """A path whose value is wanted. Plans are chosen more often than their number in the document says."""
        found = [path for path in places(file.tree) if wanted(parent_of(file.tree, path)[path[-1]])]
        deep = [path for path in found if path[0] == "layers"]
        pool = deep if deep and self.random.random() < 0.7 else found
        return self.random.choice(pool) if pool else None

    def replace(self, file) -> str:
        path = self.place(file)
        value = self.random.choice((*JUNK, *self.random.choices(self.words, k=20)))
        parent_of(file.tree, path)[path[-1]] = value
        return f"{path} = {str(value)[:40]!r}"

    def nudge(self, file) -> str:
        """Another value of the same type."""
        path = self.place(file, lambda value: not isinstance(value, (dict, list)))
        if path is None:
            return "nothing"
        owner, key = parent_of(file.tree, path), path[-1]
        value = owner[key]
        if isinstance(value, bool):
            owner[key] = not value
        elif isinstance(value, int):
            owner[key] = self.random.choice((value + 1, value - 1, 2 * value, value // 2, -value, 0, 1))
        elif isinstance(value, float):
            owner[key] = self.random.choice((value * 1.001, value * (1 + 1e-9), -value, 0.0, value * 2, value + 1))
        else:
            owner[key] = self.random.choice(self.words)
        return f"{path}: {value!r} -> {owner[key]!r}"

    def drop_value(self, file) -> str:
        path = self.place(file)
        del parent_of(file.tree, path)[path[-1]]
        return f"without {path}"

    def add_value(self, file) -> str:
        path = self.place(file, lambda value: isinstance(value, (dict, list)))
        owner = parent_of(file.tree, path)[path[-1]]
        value = self.random.choice(JUNK)
        if isinstance(owner, list):
            owner.append(owner[-1] if owner and self.random.random() < 0.6 else value)
            return f"{path} one longer"
        keys = ("later", "order", "group_size", "zero", "clip_ratio", "inverse", "channel_scale", "signs", "eigenbasis")
        key = self.random.choice((*keys, "target", "sign_choice", "trellis", "codebooks", "centroids", "v", "golden"))
        owner[key] = self.random.choice((value, True, 4, [1.0, 1.0], 8))
        return f"{path} with {key} = {str(owner[key])[:40]}"

    def swap_values(self, file) -> str:
        path = self.place(file, lambda value: isinstance(value, list) and len(value) > 1)
        if path is None:
            return "nothing"
        items = parent_of(file.tree, path)[path[-1]]
        i, j = self.random.sample(range(len(items)), 2)
        items[i], items[j] = items[j], items[i]
        return f"{path}: {i} and {j} swapped"

    def copy_value(self, file) -> str:
        """A value of another place of the same key."""
        path = self.place(file)
        same = [other for other in places(file.tree) if other[-1] == path[-1] and other != path]
        if not same:
            return "nothing"
        other = self.random.choice(same)
        parent_of(file.tree, path)[path[-1]] = ArtifactFile({}, parent_of(file.tree, other)[other[-1]], {}).copy().tree
        return f"{path} from {other}"

    def swap_sides(self, file) -> str:
        layer = self.random.choice(file.tree["layers"]) if isinstance(file.tree.get("layers"), list) else None
        if not isinstance(layer, dict) or not {"k", "v"} <= layer.keys():
            return "nothing"
        layer["k"], layer["v"] = layer["v"], layer["k"]
        return f"sides of layer {layer.get('layer')} swapped"

    # Metadata

    def metadata(self, file) -> str:
        key = self.random.choice((*file.metadata, "version", "requires", "kvq.content_hash"))
        if self.random.random() < 0.2:
            file.metadata.pop(key, None)
            return f"metadata without {key}"
        choices = {
            "version": VERSIONS,
            "requires": (",", "codebook,", ",codebook", "codebook,,trellis", "telepathy", *FEATURES),
            "kvq.content_hash": (file.metadata.get("kvq.content_hash", "").upper(), "", "xxh3-128:" + "0" * 32),
        }
        file.metadata[key] = self.random.choice(choices.get(key, ("x", "", "é")))
        return f"metadata {key} = {file.metadata[key]!r}"

    def words_of_file(self, file) -> str:
        """Version and features, in manifest and metadata alike."""
        file.tree["version"] = self.random.choice(VERSIONS[:6])
        words = [word for word in FEATURES if word in (file.tree.get("requires") or [])]
        change = self.random.randrange(4)
        if change == 1:
            words = sorted({*words, self.random.choice(FEATURES)}, key=FEATURES.index)
        elif change == 2 and words:
            words.append(self.random.choice(words))
        elif change == 3:
            self.random.shuffle(words)
        file.tree["requires"] = words
        return f"version {file.tree['version']}, requires {words}"

    # Tensors

    def tensor(self, file) -> str:
        """A name; those of golden rows are chosen less often than their number says."""
        names = sorted(file.tensors)
        plain = [name for name in names if ".golden." not in name]
        return self.random.choice(plain if plain and self.random.random() < 0.7 else names) if names else ""

    def change_values(self, file, change, text: str) -> str:
        name = self.tensor(file)
        if not name or file.array(name).size == 0:
            return "nothing"
        file.tensors[name].values = change(file.array(name).copy())
        return f"{name}: {text}"

    def flip_bit(self, file) -> str:
        def change(values):
            raw = values.reshape(-1).view(np.uint8)
            raw[self.random.randrange(len(raw))] ^= np.uint8(1 << self.random.randrange(8))
            return values

        return self.change_values(file, change, "a bit flipped")

    def put_number(self, file) -> str:
        def change(values):
            place = self.random.randrange(values.size)
            if values.dtype.kind == "f":
                values.flat[place] = self.random.choice(NUMBERS)
            else:
                values.flat[place] = self.random.choice((0, 1, np.iinfo(values.dtype).max, np.iinfo(values.dtype).min))
            return values

        return self.change_values(file, change, "a number replaced")

    def scale(self, file) -> str:
        factor = self.random.choice((1 + 3e-7, 1 + 1e-5, 1.001, 2.0, -1.0, 0.0, 1e20))

        def change(values):
            head = self.random.randrange(len(values)) if values.ndim else 0
            with np.errstate(all="ignore"):
                if values.dtype.kind == "f":
                    values[head] = values[head] * values.dtype.type(factor)
            return values

        return self.change_values(file, change, f"one head times {factor}")

    def reorder(self, file) -> str:
        how = self.random.choice(("reverse", "roll", "swap heads", "swap two", "transpose"))

        def change(values):
            if values.ndim < 2:
                return values[::-1]
            head = self.random.randrange(len(values))
            if how == "reverse":
                values[head] = values[head][..., ::-1].copy()
            elif how == "roll":
                values[head] = np.roll(values[head], 1, axis=-1)
            elif how == "swap heads":
                values[[0, head]] = values[[head, 0]]
            elif how == "swap two":
                own = values[head].reshape(-1)
                i, j = self.random.randrange(own.size), self.random.randrange(own.size)
                own[[i, j]] = own[[j, i]]
                values[head] = own.reshape(values[head].shape)
            elif values.ndim == 3 and values.shape[1] == values.shape[2]:
                values[head] = values[head].T.copy()
            return values

        return self.change_values(file, change, how)

    def zero_tensor(self, file) -> str:
        return self.change_values(file, np.zeros_like, "zeroed")

    def drop_tensor(self, file) -> str:
        name = self.tensor(file)
        file.tensors.pop(name, None)
        return f"without {name}"

    def add_tensor(self, file) -> str:
        name = self.tensor(file)
        if not name:
            return "nothing"
        layer, rest = self.random.choice(("0", "1", "2", "01", "9", "x", "")), name.split(".", 2)[-1]
        new = self.random.choice(
            (
                *(f"layers.{layer}.{rest}", f"layers.{layer}.golden.later", f"layers.{layer}.golden", "golden.later"),
                *(f"layers.{layer}.k.inverse", f"layers.{layer}.v.center", f"{name}.golden.x", "é", "layers.0.k.more"),
            )
        )
        file.tensors.setdefault(new, Tensor(file.tensors[name].dtype, file.array(name).copy()))
        return f"{new} like {name}"

    def reshape(self, file) -> str:
        def change(values):
            shapes = [values.shape[::-1], (values.size,), (1, *values.shape), (*values.shape, 1)]
            return values.reshape(self.random.choice(shapes))

        return self.change_values(file, change, "another shape")

    def relabel(self, file) -> str:
        name = self.tensor(file)
        if not name:
            return "nothing"
        file.tensors[name].dtype = self.random.choice(SAME_SIZE.get(file.tensors[name].dtype, ("F32",)))
        return f"{name}: type {file.tensors[name].dtype}"

    def cut_tensor(self, file) -> str:
        return self.change_values(file, lambda values: values[:-1] if values.ndim else values, "one row less")

    def drop_golden(self, file) -> str:
        """Golden rows of a layer, or all but the first of its tokens, in manifest and tensors alike."""
        layers = [layer for layer in file.tree.get("layers") or [] if isinstance(layer, dict) and "golden" in layer]
        if not layers:
            return "nothing"
        layer = self.random.choice(layers)
        prefix = f"layers.{layer.get('layer')}.golden."
        fewer = self.random.random() < 0.5 and isinstance(layer["golden"], dict)
        for name in [name for name in file.tensors if name.startswith(prefix)]:
            if not fewer:
                del file.tensors[name]
            elif not name.endswith((".q", ".out")):
                file.tensors[name].values = file.array(name)[:1].copy()
        if fewer:
            layer["golden"]["count"] = 1
        else:
            del layer["golden"]
        return f"{prefix}: {'one token' if fewer else 'dropped'}"

    # The container

    def damage(self, content: bytes) -> tuple[str, bytes]:
        start = 8 + struct.unpack_from("<Q", content)[0]
        kind = self.random.choice(("header byte", "cut", "longer", "length", "space", "any byte", "entry", "entry"))
        copied = bytearray(content)
        if kind == "header byte":
            copied[self.random.randrange(8, start)] = self.random.choice(
                b' {}[]",:0123456789abcdeftrunl\\\n\x00\xff-+.'
            )
        elif kind == "entry":
            return self.damage_entry(content, start)
        elif kind == "any byte":
            copied[self.random.randrange(len(copied))] ^= 1 << self.random.randrange(8)
        elif kind == "cut":
            del copied[self.random.randrange(len(copied)) :]
        elif kind == "longer":
            copied += bytes(self.random.randrange(1, 9))
        elif kind == "length":
            copied[:8] = struct.pack("<Q", max(0, start - 8 + self.random.choice((-8, -1, 1, 8))))
        else:
            space = self.random.choice((b"\n ", b"\t\t", b"  ", b"\x0c ", b"\xc2\xa0"))
            place = self.random.choice((8, 9, start))
            copied[:8] = struct.pack("<Q", start - 8 + len(space))
            copied[place:place] = space
        return kind, bytes(copied)

    def damage_entry(self, content: bytes, start: int) -> tuple[str, bytes]:
        """Changes the description of one tensor in the header."""
        header = json.loads(content[8:start])
        entry = header[self.random.choice(sorted(header))]
        field = self.random.choice(("dtype", "shape", "data_offsets", "more"))
        if "dtype" not in entry:
            return "nothing", content
        choices = {
            "dtype": ("f32", "F32", "BOOL", "F8_E4M3", "", 1, None, ["F32"]),
            "shape": ([], [-1], [1.0], [True], None, "1", [2**62, 4], [2**64], [1] * 65, entry["shape"][::-1]),
            "data_offsets": ([0, 0], [4, 0], [0], [0, 4, 8], [0.0, 4], [-4, 0], None, [0, 2**70], {"a": 1}),
        }
        entry[field] = self.random.choice(choices.get(field, (1, "x")))
        if self.random.random() < 0.1:
            del entry[field]
        text = json.dumps(header, ensure_ascii=False).encode()
        return f"entry: {field} {entry.get(field)}", struct.pack("<Q", len(text)) + text + content[start:]
