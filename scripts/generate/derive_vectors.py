#!/usr/bin/env python3
"""Derives formats/vectors.json from the text of formats/packing.md, in exact rational arithmetic.

A third writing of the specification, beside the C++ codec and python/kvq: slow, without numpy, and with nothing in
common with them. packing_spec.py has the algorithms, exact_numbers.py the arithmetic. (Only the binary32 costs of
trellis paths are computed in Python's floats; see binary32s for why that is the same.) Inputs are chosen by hand in
vector_cases.py, each with its reason; vector_claims.py tries what these reasons say.

    derive_vectors.py           writes formats/vectors.json
    derive_vectors.py --check   compares, exit code 6 if the file says something else
"""

import json
import sys
from pathlib import Path

import vector_file
from packing_spec import Spec, with_patterns
from vector_cases import CASES
from vector_claims import check_whys

VECTORS = Path(__file__).resolve().parents[2] / "formats" / "vectors.json"


def vectors_text(spec: Spec = Spec()) -> str:
    """The text of the whole file, with one vector in each line."""
    vectors = [spec.derive(with_patterns(case)) for case in CASES]
    check_whys({vector["name"]: vector for vector in vectors})
    lines = ",\n".join(map(json.dumps, vectors))
    return f'{{"format": "kvq-packing-vectors", "version": "1.0", "vectors": [\n{lines}\n]}}\n'


def main() -> int:
    return vector_file.run(__doc__, VECTORS, vectors_text, "packing.md and vector_cases.py")


if __name__ == "__main__":
    sys.exit(main())
