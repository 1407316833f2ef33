"""kvq.json_schema against the package jsonschema, on manifests with one change each."""

import copy
import json
import random

import pytest
from test_artifact_coders import sample as featured
from test_read_artifact import sample as plain

from kvq.artifact_reader import artifact_schema
from kvq.json_schema import schema_fault

jsonschema = pytest.importorskip("jsonschema")
JUNK = (None, True, "", "x", "exact", "1.2", [], [1, 1], {}, {"a": 1}, 0, -1, 1, 4, 9, 16, 5000, 0.5, -0.5, 2.5)


def places(value, path=()):
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(child, (*path, key))


def owner(tree, path):
    for key in path[:-1]:
        tree = tree[key]
    return tree


@pytest.mark.parametrize("sample", [plain, featured], ids=["plain", "featured"])
def test_both_decide_alike(sample):
    tree, own = sample()[0], random.Random(5)
    validator = jsonschema.Draft7Validator(artifact_schema())
    assert schema_fault(tree, artifact_schema()) == ""
    all_places, refused = list(places(tree)), 0
    for _ in range(400):
        changed = copy.deepcopy(tree)
        path, value = own.choice(all_places), own.choice((*JUNK, ...))
        if value is ...:
            del owner(changed, path)[path[-1]]
        else:
            owner(changed, path)[path[-1]] = value
        fault = schema_fault(changed, artifact_schema())
        assert bool(fault) == (not validator.is_valid(changed)), (path, value, fault)
        refused += bool(fault)
    assert 100 < refused < 390


@pytest.mark.parametrize(
    "value, fault", [(2.0, "expected integer"), (2**63, "expected integer"), (True, "expected integer")]
)
def test_integers_are_those_of_the_other_reader(value, fault):
    tree = plain()[0]
    tree["calibration"]["seed"] = value
    assert schema_fault(tree, artifact_schema()).startswith(f"calibration/seed: {fault}")


def test_faults_name_their_place_in_one_line():
    tree = json.loads(json.dumps(plain()[0]))
    tree["layers"][1]["k"]["bits"] = "two\nlines" * 20
    fault = schema_fault(tree, artifact_schema())
    assert fault.startswith("layers/1/k/bits: ") and "\n" not in fault and len(fault) < 140
