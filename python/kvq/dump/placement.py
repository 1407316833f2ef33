"""Where a model runs, and what a quantized checkpoint needs. No weight is loaded here."""

import importlib.util
from dataclasses import dataclass

import torch

from ..errors import EXIT_UNSUPPORTED, KvqError, one_line

# Words of --device that spread a model over several devices.
MAPS = ("auto", "balanced")
# quant_method of config.json -> packages that transformers needs to load such a checkpoint, as (module, PyPI name).
ACCELERATE = ("accelerate", "accelerate")
QUANTIZERS = {
    "aqlm": [ACCELERATE, ("aqlm", "aqlm")],
    "auto-round": [ACCELERATE, ("auto_round", "auto-round")],
    "awq": [ACCELERATE, ("gptqmodel", "gptqmodel")],
    "bitnet": [ACCELERATE],
    "bitsandbytes": [ACCELERATE, ("bitsandbytes", "bitsandbytes")],
    "compressed-tensors": [ACCELERATE, ("compressed_tensors", "compressed-tensors")],
    "eetq": [ACCELERATE, ("kernels", "kernels")],
    "fbgemm_fp8": [ACCELERATE, ("fbgemm_gpu", "fbgemm-gpu")],
    "fp8": [ACCELERATE],
    "fp_quant": [ACCELERATE, ("fp_quant", "fp_quant")],
    "gptq": [ACCELERATE, ("optimum", "optimum"), ("gptqmodel", "gptqmodel")],
    "higgs": [ACCELERATE, ("flute", "flute-kernel"), ("fast_hadamard_transform", "fast_hadamard_transform")],
    "hqq": [ACCELERATE, ("hqq", "hqq")],
    "mxfp4": [ACCELERATE],
    "mxfp8": [ACCELERATE],
    "quanto": [ACCELERATE, ("optimum", "optimum-quanto")],
    "spqr": [ACCELERATE, ("spqr_quant", "spqr_quant")],
    "torchao": [ACCELERATE, ("torchao", "torchao")],
    "vptq": [ACCELERATE, ("vptq", "vptq")],
}


def has_package(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def quantization_of(config: dict) -> str | None:
    """The quant_method of a parsed config.json; None for weights that are plain numbers."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(found, dict):
        return None
    if found.get("load_in_4bit") or found.get("load_in_8bit"):
        return "bitsandbytes"
    return str(found.get("quant_method", "without a quant_method"))


def refuse_missing_packages(config: dict, where: str) -> None:
    """Refuses a quantized checkpoint whose packages are not installed, and names what to install."""
    method = quantization_of(config)
    if method is None:
        return
    other = "or give the checkpoint that it was quantized from"
    if method not in QUANTIZERS:
        raise KvqError(
            EXIT_UNSUPPORTED,
            f"{where}: quantized weights ({method}) are not supported",
            f"supported: {', '.join(QUANTIZERS)}; {other}",
        )
    missing = [name for module, name in QUANTIZERS[method] if not has_package(module)]
    if missing:
        raise KvqError(
            EXIT_UNSUPPORTED,
            f"{where}: the weights are quantized ({method}), and the Python packages to load them are missing: "
            f"{', '.join(missing)}",
            f"pip install {' '.join(missing)}; {other}",
        )


@dataclass(frozen=True)
class Placement:
    """`device_map` for transformers, or None if the model is loaded into CPU memory and then moved to `device`.

    `device` is where most of the arithmetic runs.
    """

    device: str
    device_map: object


def choose_placement(device: str) -> Placement:
    """What --device means on this machine."""
    if device in MAPS:
        return _spread(device)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise KvqError(
            EXIT_UNSUPPORTED, f"device '{device}': {one_line(error)}", "auto, balanced, cpu, cuda or cuda:N"
        ) from error
    # With accelerate, weights go straight to the device, and never lie in CPU memory as a whole.
    return Placement(device, {"": device} if has_package("accelerate") else None)


def _spread(device: str) -> Placement:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count and device == "balanced":
        raise KvqError(
            EXIT_UNSUPPORTED, "device 'balanced': expected GPUs to spread the model over, found none", "--device cpu"
        )
    if not count:
        return choose_placement("cpu")
    if not has_package("accelerate"):
        raise KvqError(
            EXIT_UNSUPPORTED,
            f"device '{device}': the Python package accelerate is missing, which spreads a model over devices",
            "pip install accelerate; or --device cuda, for a model that fits one GPU",
        )
    return Placement("cuda", device)


def describe_map(model) -> str | None:
    """Says how layers were spread; None for a model on one device."""
    places = [str(place) for place in getattr(model, "hf_device_map", {}).values()]
    if len(set(places)) < 2:
        return None
    counts = ", ".join(f"{places.count(place)} on {place}" for place in dict.fromkeys(places))
    slow = "; parts on cpu or disk are moved for every sequence, which is slow"
    return f"parts of the model: {counts}{slow if {'cpu', 'disk'} & set(places) else ''}"


def execution_device(module: torch.nn.Module) -> torch.device:
    """Where a module computes. accelerate keeps the weights of offloaded modules on `meta` between calls."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return torch.device(device) if device is not None else next(module.parameters()).device


def input_device(model) -> torch.device:
    """Where token ids have to be."""
    return execution_device(model.get_input_embeddings())


def linear_weight(module: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] of a linear module, also if it is quantized or offloaded: then as the products with the unit
    vectors, computed in `dtype`."""
    weight = module.weight
    if type(module) is torch.nn.Linear and weight.is_floating_point() and weight.device.type != "meta":
        return weight.detach()
    device = execution_device(module)
    with torch.no_grad():
        units = torch.eye(module.in_features, dtype=dtype, device=device)
        bias = module(torch.zeros(1, module.in_features, dtype=dtype, device=device))
        return (module(units) - bias).T
