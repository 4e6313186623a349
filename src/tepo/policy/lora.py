"""A low-rank adapter on the policy: made or loaded with peft, switched off for a reference, merged for saving."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo.core.errors import InputError, MissingExtra
from tepo.core.seeds import address
from tepo.policy.config import LoraConfig


class Adapter:
    """The adapter of one model. `model` is the transformers model with the adapter's layers in it."""

    def __init__(self, peft_model: Any, *, preloaded: bool) -> None:
        self._peft = peft_model
        self._preloaded = preloaded
        self.model: Any = peft_model.get_base_model()

    @property
    def why_no_reference(self) -> str | None:
        """Why the model without the adapter is not the start policy; None where it is."""
        if self._preloaded:
            return "the adapter was trained before, so the base without it is not the policy training starts from"
        if self._settings.modules_to_save:
            names = ", ".join(self._settings.modules_to_save)
            return f"modules_to_save ({names}) are trained in full, and switching the adapter off does not undo that"
        return None

    @property
    def _settings(self) -> Any:
        return self._peft.peft_config[self._peft.active_adapter]

    def covers(self, module: torch.nn.Module) -> bool:
        """Whether a part of `module` is adapted."""
        return bool(_adapter_layers(module))

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the base alone inside the block."""
        layers = _adapter_layers(self.model)
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def merged_state(self) -> dict[str, Tensor]:
        """Return the weights of the model with the adapter added in, float32, named as without an adapter."""
        name = self._peft.active_adapter
        merged = {}
        for key, value in self.model.state_dict().items():
            if ".lora_" in key or ".original_module." in key:
                continue
            clean = key.replace(".base_layer.", ".").replace(f".modules_to_save.{name}.", ".")
            merged[clean] = value.float() if value.is_floating_point() else value
        with torch.no_grad():
            for path, layer in self.model.named_modules():
                if hasattr(layer, "get_delta_weight"):
                    merged[f"{path}.weight"] = merged[f"{path}.weight"] + layer.get_delta_weight(name).float()
        return merged

    def save(self, folder: Path) -> None:
        """Write the adapter alone to `folder`, as peft reads it."""
        self._peft.save_pretrained(str(folder), save_embedding_layers=False)


def add_adapter(model: Any, config: LoraConfig, *, name: str, seed: int) -> Adapter:
    """Freeze the model and add a new adapter, which changes nothing until it is trained.

    `name` is what was loaded, kept in the adapter's configuration as its base.

    Raises:
        MissingExtra: peft is not installed.
        InputError: no module has one of the names, or the change would part weights that are tied.
    """
    peft = _peft(f"model.lora for {name!r}")
    _check_targets(model, config)
    targets = config.target_modules
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(config.modules_to_save) or None,
        use_rslora=config.rslora,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=_devices(model)):
        torch.manual_seed(address(seed, "policy/lora") % 2**63)
        wrapped = peft.get_peft_model(model, settings)
    wrapped.peft_config[wrapped.active_adapter].base_model_name_or_path = name
    return Adapter(wrapped, preloaded=False)


def load_adapter(model: Any, folder: str) -> Adapter:
    """Put the trained adapter of `folder` on the model, to be trained further.

    Raises:
        MissingExtra: peft is not installed.
        InputError: the adapter does not fit the model.
    """
    peft = _peft(f"the adapter in {folder!r}")
    try:
        wrapped = peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
    except (ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"the adapter in {folder!r} does not fit its base model: {error}") from error
    kind = wrapped.peft_config[wrapped.active_adapter].peft_type
    if str(getattr(kind, "value", kind)) != "LORA":
        raise InputError(f"the adapter in {folder!r} is of type {kind}; only LoRA is supported")
    return Adapter(wrapped, preloaded=True)


def _peft(purpose: str) -> Any:
    if importlib.util.find_spec("peft") is None:
        raise MissingExtra("peft", "lora", purpose)
    import peft

    return peft


def _check_targets(model: Any, config: LoraConfig) -> None:
    """Refuse names that match nothing, and adapters that would part the head from a tied embedding."""
    modules = [name for name, _ in model.named_modules()]
    targets = () if isinstance(config.target_modules, str) else config.target_modules
    for field, names in (("target_modules", targets), ("modules_to_save", config.modules_to_save)):
        for wanted in names:
            if not any(name == wanted or name.endswith(f".{wanted}") for name in modules):
                endings = sorted({name.rpartition(".")[2] for name, module in _linears(model)})
                raise InputError(
                    f"model.lora.{field}: no module is called {wanted!r}; linear layers here: {', '.join(endings)}"
                )
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    for name, module in model.named_modules():
        named = any(name == one or name.endswith(f".{one}") for one in (*targets, *config.modules_to_save))
        if named and id(module) in ends:
            raise InputError(
                f"model.lora cannot adapt {name!r}: this model ties its embedding and its head, and an adapter on"
                " one of them would part them. Leave it out"
            )


def _linears(model: Any) -> list[tuple[str, torch.nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def _adapter_layers(model: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _devices(model: Any) -> list[torch.device]:
    devices = {parameter.device for parameter in model.parameters()}
    return [device for device in devices if device.type == "cuda"]
