"""Loads models from a folder, the hub, or the tiny models of mmaccel-lab; spreads a model's layers over several devices.

If a model exceeds one device, its decoder layers are placed in consecutive runs, one per device, in order. All else (vision
tower, embeddings, final norm, LM head) is on the first device, where prompts enter and logits leave. `MoveInputsHook` moves
the hidden state, and the arguments shared by all layers, from device to device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import ConfigOnlyModel, ModelView, home_device
from mmaccel.core.attach import adapt_recipe_to_model, adapter_for, family_of
from mmaccel.core.errors import ModelError, UnknownName, one_line_error, quoted
from mmaccel.core.files import outside
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.models import shipped
from mmaccel.models.install import Hooks, PrefillHook

UNREACHED = frozenset(
    {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}
)
"""Errors of the hub's client, and of what it sends by, that say nothing of the name."""
MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")
"""Words of a device map that name no device."""
UNKNOWN = frozenset({"RepositoryNotFoundError", "HFValidationError"})


def resolve_model_name(name: str | Path) -> str:
    """Return the path of a folder or of a tiny model, or `name` itself if it can be a hub name (owner/name).

    Raises `ModelError` for a name that is none of these.
    """
    text = str(name)
    if text in shipped.NAMES:
        return str(shipped.tiny_model_folder(text))
    if Path(text).exists():
        return text
    if text.startswith(("/", ".", "~")) or text.count("/") > 1:
        raise ModelError(
            f"there is no folder {text}; check the path, or name one of {', '.join(shipped.NAMES)}."
        )
    if "/" in text:
        return text
    unknown = UnknownName("model", text, shipped.NAMES)
    raise ModelError(f"{unknown} A folder will do too, or a hub name with its owner (owner/name).")


def check_device(device: torch.device | str, field: str = "device") -> torch.device:
    """Return `device` if this machine has it; else raise a `ModelError` that names the argument `field`."""
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda", "mps", "xpu"):
        raise ModelError(f"{field}: {quoted(device)} is not a device; give cpu, cuda or cuda:1.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= count:
        devices = f"{count} CUDA device{'' if count == 1 else 's'}"
        raise ModelError(f"{field}: {device} is not there; this machine has {devices}.")
    return place


def load_model(
    name: str | Path,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    devices: Sequence[torch.device | str] | None = None,
    *,
    device_map: Any = None,
    revision: str | None = None,
    quantization_config: Any = None,
    attn_implementation: Any = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load the model `name` (a folder, a hub name or a tiny model), unmodified, in evaluation mode; `dtype` "auto" is the
    checkpoint's. Raises `ModelError` if it cannot be loaded, and, for an unsupported model type, before weights are read.

    Give one of `device` (default: CPU), `device_map` ("auto", a device, or modules by name) and `devices`, over which the
    decoder layers are spread in order, with everything else on the first. `device_map` needs the package accelerate. Weights
    are read into host memory first for `devices`, and for `device` without accelerate. The arguments after `*` are passed to
    `from_pretrained`.
    """
    from transformers import AutoModelForImageTextToText

    if isinstance(devices, str):
        one = quoted(devices)
        raise ModelError(f"devices: {one} is a single device; give a list, or device={one}.")
    if sum(given is not None for given in (device, devices, device_map)) > 1:
        raise ModelError("device, devices and device_map exclude each other; give one of them.")
    first = check_device("cpu" if device is None else device)
    places = None if devices is None else [check_device(one, "devices") for one in devices]
    for one in device_map.values() if isinstance(device_map, Mapping) else (device_map,):
        if one is not None and one not in MAPS:
            check_device(torch.device("cuda", one) if isinstance(one, int) else one, "device_map")
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in ("auto", None) and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise UnknownName("dtype", str(dtype), ("auto", "bfloat16", "float16", "float32"))
    source = resolve_model_name(name)
    folder = Path(source)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ModelError(f"model {source!r} has no config.json; give a folder written by save_pretrained.")
    config = read_config(find_or_download_folder(source, revision))
    own = "auto_map" in config and not trust_remote_code
    try:
        check_model_type(config)
    except ModelError as error:
        raise (ModelError(_own_code(source)) if own else error) from None
    if device_map is None and first.type != "cpu" and find_spec("accelerate") is not None:
        device_map = first
    how = {
        "device_map": device_map,
        "revision": revision,
        "quantization_config": quantization_config,
        "attn_implementation": attn_implementation,
    }
    given = {name: value for name, value in how.items() if value is not None}
    model = _read(AutoModelForImageTextToText, source, dtype, trust_remote_code=trust_remote_code, **given)
    if places is not None:
        spread_layers_over_devices(model, places)
    elif device_map is None and quantization_config is None:
        model.to(first)
    return model.eval()  # type: ignore[no-any-return]


def check_model_type(config: Mapping[str, Any]) -> None:
    """Raise `ModelError` unless a family supports the model type and the layers that a config.json states."""
    from transformers import CONFIG_MAPPING as TYPES

    try:
        family: Any = family_of(kind := str(config.get("model_type")))
    except ModelError:
        if kind in TYPES and not any(part in str([*config]) for part in ("vision", "visual", "image")):
            raise ModelError(f"models of type {kind!r} take no images or videos; give another.") from None
        raise
    if "*" in family.model_types:
        family.check_layers(ConfigOnlyModel(TYPES[kind].from_dict(dict(config))))


def _read(
    kind: Any, source: str, dtype: torch.dtype | str, *, trust_remote_code: bool = False, **given: Any
) -> Any:
    """The model that a class of transformers' makes of `source`; raises `ModelError`."""
    from safetensors import SafetensorError

    try:
        return kind.from_pretrained(source, dtype=dtype, trust_remote_code=trust_remote_code, **given)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            _not_found_message(source, error)
            or _remote_code_message(source, error)
            or f"model {source!r} cannot be loaded ({one_line_error(error)}); give another folder or hub name."
        ) from error
    except (ImportError, RuntimeError) as error:
        # transformers could not import a torchvision, which is made for one torch alone.
        if any("torchvision" in str(cause) for cause in _exception_chain(error)):
            raise ModelError(
                f"torchvision: the installed one does not work with torch {torch.__version__}; install the one made for it, "
                "or uninstall it, since mmaccel does not need it."
            ) from error
        if not isinstance(error, ImportError):
            raise
        raise ModelError(
            f"model {source!r} needs a package that is not installed here ({one_line_error(error)})."
        ) from error


def config_only_view(name: str | Path) -> ModelView:
    """Return a `ModelView` of the model `name` from its configuration alone; no weights are read. Raises `ModelError` if
    there is no such model or its family is not supported."""
    source = resolve_model_name(name)
    family = family_of(_type(source))
    return ModelView(ConfigOnlyModel(_config(source)), family, adapter_for)


def load_text_model(name: str | Path, like: nn.Module) -> nn.Module | None:
    """Load a text-only causal language model (a draft) in the dtype and on the device of `like`; None if `name` is a
    vision-language model of a registered family. If `like` has no weights, or `name` is no causal language model, only its
    config is loaded (`ConfigOnlyModel`). Raises as `load_model` does."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    source = resolve_model_name(name)
    if any(_type(source) in getattr(family, "model_types", ()) for family in registry("model").values()):
        return None
    config = _config(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or isinstance(like, ConfigOnlyModel):
        return ConfigOnlyModel(config)
    return _read(AutoModelForCausalLM, source, next(like.parameters()).dtype).to(home_device(like)).eval()  # type: ignore[no-any-return]


def _type(source: str) -> str:
    return str(read_config(find_or_download_folder(source)).get("model_type"))


def _config(source: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            _remote_code_message(source, error)
            or f"model {source!r}: its config.json cannot be read ({one_line_error(error)})."
        ) from error


def check_recipe(recipe: Recipe | str | Path | Mapping[str, Any], name: str | Path) -> None:
    """Raise what `accelerate` would raise for this recipe on the model `name`; no weights of it or of a draft are loaded."""
    adapt_recipe_to_model(Recipe.load(recipe), config_only_view(name))


@dataclass(eq=False)
class MoveInputsHook(PrefillHook):
    """Forward pre-hook that moves a module's arguments to `device`; keyword arguments, which all layers share, only once.

    memo  (device, argument name) -> the argument as last given, and its moved copy; shared by all layers of a model
    ends  whether this is the last module that a pass runs; the hook then clears `memo`
    """

    device: torch.device
    memo: dict[tuple[torch.device, str], tuple[Any, Any]]
    ends: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positional, named = tuple(self._moved(x) for x in args), {}
        for name, x in kwargs.items():
            source, named[name] = self.memo.get((self.device, name), (None, None))
            if source is not x or x is None:
                named[name] = self._moved(x)
                self.memo[self.device, name] = x, named[name]
        if self.ends:
            self.memo.clear()
        return positional, named

    def _moved(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            # Into host memory it is waited for: who reads there does not know of the device's stream.
            return x.to(self.device, non_blocking=self.device.type != "cpu")
        if isinstance(x, tuple):
            return tuple(self._moved(one) for one in x)
        if isinstance(x, ForwardPass) and x.layout.device != self.device:
            # Read of the device it comes from, and so not of one that has yet to get there.
            _ = x.layout.has_padding
            return replace(x, layout=x.layout.to(self.device))
        return x


def skip_unused_norm_rows(thread: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook for a final norm whose output the thread `thread` does not read: in calls of that thread the norm
    gets no rows. Otherwise a model's first device would wait for the norm on the last device before its next pass."""
    return ((args[0][:, :0], *args[1:]), kwargs) if threading.get_ident() == thread else None


def balance_layers_over_devices(sizes: Sequence[int], ends: int, count: int) -> list[int]:
    """Assign layers of `sizes` bytes to `count` devices: a device index for each; the first device also holds `ends` bytes.

    Layers stay in order, each device gets at least one, and bytes are as even as whole layers allow.
    """
    whole, before = ends + sum(sizes), ends
    chosen: list[int] = []
    for number, size in enumerate(sizes):
        middle = before + size / 2
        device = min(int(middle * count / whole), count - 1)
        least, last = count - (len(sizes) - number), chosen[-1] if chosen else 0
        chosen.append(min(max(device, least, last), last + 1 if chosen else 0))
        before += size
    return chosen


def group_layers_by_device(
    places: Sequence[torch.device], home: torch.device
) -> list[tuple[torch.device, list[int]]]:
    """Group layers into consecutive runs (device, layer indices); layer n is on `places[n]`. The first and the last run are
    on `home`, for embeddings and LM head, and have no layers if the first or the last layer is elsewhere."""
    found: list[tuple[torch.device, list[int]]] = [(home, [])]
    for number, place in enumerate(places):
        if place != found[-1][0]:
            found.append((place, []))
        found[-1][1].append(number)
    if found[-1][0] != home:
        found.append((home, []))
    return found


def spread_layers_over_devices(model: nn.Module, devices: Sequence[torch.device | str]) -> Callable[[], None]:
    """Move the decoder layers of `model` over `devices`, and everything else to the first one. Returns a function that
    removes the hooks and leaves the weights in place. Raises `ModelError` for fewer layers than devices."""
    family: Any = adapter_for(model)
    layers = family.layers(model)
    places = [torch.device(device) for device in devices]
    if not 1 <= len(places) <= len(layers):
        raise ModelError(
            f"devices: {len(places)} devices for {len(layers)} layers; give one or more, at most one for each layer."
        )
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    ends = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    chosen = [places[which] for which in balance_layers_over_devices(sizes, ends, len(places))]
    # One layer after the other, so that no device ever holds more than its own.
    for layer, place in zip(layers, chosen, strict=True):
        layer.to(place)
    inside = {id(module) for module in layers.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.to(places[0])
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(places[0]))
    return install_input_move_hooks(model, chosen, places[0])


def install_input_move_hooks(
    model: nn.Module, chosen: Sequence[torch.device], first: torch.device
) -> Callable[[], None]:
    """Install a `MoveInputsHook` on each decoder layer, to its device in `chosen`, and on the final norm, to `first`;
    return a function that removes the hooks."""
    family: Any = adapter_for(model)
    memo: dict[tuple[torch.device, str], tuple[Any, Any]] = {}
    if all(place == first for place in chosen):
        return lambda: None
    modules = [*zip(family.layers(model), chosen, strict=True), (family.text_model(model).norm, first)]
    hooks = Hooks()
    for module, place in modules:
        hooks.add_pre_hook(module, MoveInputsHook(place, memo, module is modules[-1][0]), prepend=True)
    return hooks.close


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of `folder`; raises `ModelError` if there is none."""
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder} has no config.json: name the folder of a saved model.")
    return config


def find_or_download_folder(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return a model's folder; of a hub model all but the weights is downloaded. Raises `ModelError` if there is none."""
    text = os.fspath(name)
    if Path(text).is_dir():
        return Path(text)
    if Path(text).exists() or text.count("/") != 1:
        raise ModelError(f"{text} is not a folder: name the folder of a saved model.")
    from huggingface_hub import snapshot_download

    try:
        small = ["*.json", "*.txt", "*.jinja", "*.model"]
        return Path(snapshot_download(text, revision=revision, allow_patterns=small))
    except Exception as error:
        unfetched = f"model {text!r} cannot be fetched from the hub ({one_line_error(error)})."
        raise ModelError(_not_found_message(text, error) or unfetched) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None without a file. Raises `ModelError` if it holds anything else."""
    if not path.is_file():
        return None
    content = outside.read_json(path, str(path), ModelError, fix="save it again")
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold one JSON object.")
    return content


def _exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and then its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _not_found_message(name: str, error: BaseException) -> str | None:
    """Error message for a model name found neither on disk nor on the hub; None if `error` is of another kind."""
    kinds = {kind.__name__ for cause in _exception_chain(error) for kind in type(cause).__mro__}
    if kinds & UNREACHED:
        return (
            f"model {name!r} is not on this machine, and the hub, which may have it, cannot be reached; go online (and "
            f"leave HF_HUB_OFFLINE unset), or give a folder or one of {', '.join(shipped.NAMES)}."
        )
    if kinds & UNKNOWN:
        return f"model {name!r} is neither a folder here nor a model that the hub gives; check the name."
    return None


def _remote_code_message(name: str, error: Exception) -> str | None:
    """Error message for a model that needs `trust_remote_code`; None if `error` is of another kind."""
    return _own_code(name) if "trust_remote_code" in str(error) else None


def _own_code(name: str) -> str:
    return f"model {name!r} needs code of its own, which is not run; give a model that transformers has a class for."
