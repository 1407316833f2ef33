"""Built-in schemes: kvq-eval and python/kvq have one list of names, and the same rows behind each name."""

import json
import re

import h5py
import numpy as np
import pytest
from kvq_tools import run, succeed

from kvq.builtin_schemes import FAMILIES, BuiltinPlans, parse_name
from kvq.errors import KvqError

torch = pytest.importorskip("torch")

USAGE = 2
NAMES = [
    "bf16",
    "fp8",
    "fp8-head",
    "fp8-unscaled",
    "nvfp4",
    "naive-int3",
    "quarot-int2",
    "saw-int4",
    "symmetric-norm-2",
    "tq-mse-3",
    "turboquant-qjl-1",
    "turboquant-qjl-3",
    "kivi-2",
    "kivi-4-r32",
    "kivi-scale-only-3",
]


def test_every_family_is_compared_below():
    assert {parse_name(name).family for name in NAMES} == set(FAMILIES)


def test_both_have_one_list_of_names(make_dump):
    dump = make_dump(tokens=16, sequences=1, layers=1, head_dim=16)
    result = run("kvq-eval", "--model", dump, "--scheme", "none")
    assert result.code == USAGE
    listed = re.search(r"choose one of (.*?); ", result.stderr)[1].split(", ")
    assert listed == list(FAMILIES)
    footer = run("kvq-eval", "--help").stdout
    assert [name for name in FAMILIES if f"  {name} " not in footer] == []


@pytest.mark.parametrize(
    "name",
    ["kivi-9", "kivi-2-r33", "kivi-2-r0", "kivi-2-r65568", "fp8-2", "nvfp4-16", "naive-int", "tq-mse", "tq-mse-2-r32"],
)
def test_both_refuse_the_same_names(make_dump, name):
    with pytest.raises(KvqError):
        parse_name(name)
    assert run("kvq-eval", "--model", make_dump(tokens=16, sequences=1, layers=1), "--scheme", name).code == USAGE


@pytest.mark.parametrize(
    "name",
    [
        "naive-int22-k",
        "Naive-int2",
        "zigzag",
        "kivi-9",
        "kivi-2-r33",
        "fp88",
        "tq-mse",
        "symetric-norm-3",
        "nvfp",
        "-k",
    ],
)
def test_both_refuse_a_name_in_the_same_words(make_dump, name):
    with pytest.raises(KvqError) as refusal:
        parse_name(name)
    said = run("kvq-eval", "--model", make_dump(tokens=16, sequences=1, layers=1), f"--scheme={name}").stderr
    assert said == f"kvq-eval: error: {refusal.value}\nhint: {refusal.value.hint}\n"


def test_a_name_of_the_package_alone_is_suggested_too():
    with pytest.raises(KvqError) as refusal:
        parse_name("exakt")
    assert refusal.value.hint.startswith("did you mean exact? ")


@pytest.mark.parametrize("name, same", [("kivi", "kivi-2"), ("kivi-r64-k", "kivi-2-r64-k"), ("kivi-2-r128", "kivi-2")])
def test_both_read_short_names_alike(make_dump, name, same):
    own, other = parse_name(name), parse_name(same)
    assert own == other
    dump = make_dump(tokens=300, sequences=1, layers=1, head_dim=16)
    found = json.loads(succeed("kvq-eval", "--json", "--model", dump, "--scheme", name, "--scheme", same).stdout)
    first, second = ({key: scheme[key] for key in ("mean", "effective_bits")} for scheme in found["schemes"])
    assert first == second


@pytest.fixture(scope="module", params=[48, 64])
def dump(request, make_dump):
    return make_dump(tokens=75, sequences=1, layers=2, head_dim=request.param, query_spectrum=0.8, outlier_channels=3)


@pytest.fixture(scope="module")
def measured(dump):
    """kvq-eval's errors of all names, from one run."""
    flags = [word for name in NAMES for word in ("--scheme", name)]
    said = json.loads(succeed("kvq-eval", "--json", "--no-windows", "--model", dump, *flags).stdout)
    return {scheme["name"]: scheme for scheme in said["schemes"]}


@pytest.mark.parametrize("name", NAMES)
def test_both_store_the_same_rows(dump, measured, name):
    from kvq.coded_attention import reconstruct

    plans = BuiltinPlans(name, with_windows=False)
    with h5py.File(dump) as file:
        for layer, said in enumerate(measured[name]["layers"]):
            for side in "kv":
                x = torch.from_numpy(file[f"layers/{layer}/{side}"][:].astype(np.float32)).transpose(0, 1).contiguous()
                plan = plans(layer, side, x.shape[0], x.shape[2])
                error = (reconstruct(plan, x) - x).double().square().sum() / x.double().square().sum()
                # Another order of float sums moves a few codes over their thresholds.
                assert float(error) == pytest.approx(said[f"{side}_rel_mse"], rel=2e-4), (layer, side)
                if not name.startswith("kivi"):  # a last group that is not full takes more there
                    assert 8 * plan.row_bytes / x.shape[2] == pytest.approx(said[f"{side}_effective_bits"])


def test_small_floats_are_those_of_torch():
    from kvq.torch_schemes import E2M1, E4M3

    x = torch.cat([torch.randn(20000, generator=torch.manual_seed(1)) * scale for scale in (1e-3, 0.1, 1, 100, 300)])
    x = torch.cat([x, torch.arange(-500, 500) / 8.0, torch.tensor([0.0, 2.0**-10, 3 * 2.0**-10, 1e30, -1e30])])
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(E4M3.round(x), expected)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    halves = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    for half, rounded in halves.items():
        assert E2M1.round(torch.tensor([half, -half])).tolist() == [rounded, -rounded]
    nearest = table[(x.abs().clamp(max=6)[:, None] - table).abs().argmin(1)] * x.sign()
    clear = ~torch.isin(x.abs(), torch.tensor(list(halves)))
    assert torch.equal(E2M1.round(x)[clear].abs(), nearest[clear].abs())


def test_residual_of_kivi_in_attention():
    """A query reads its own token and the i mod R keys before it exactly, and R values."""
    windows = BuiltinPlans("kivi-2-r32").own_windows
    query = torch.arange(200)
    assert torch.equal(query - windows["k"].coded_end(query), query % 32)
    assert torch.equal(windows["v"].coded_end(query), (query - 32).clamp(min=0))
    assert BuiltinPlans("kivi-2").own_windows["k"].granule == 128
    assert BuiltinPlans("kivi-2", with_windows=False).own_windows is None
    assert BuiltinPlans("kivi-scale-only-2").own_windows is None
