"""Loading: built-in models, folders, what is wrong with a folder, devices, precisions, saving."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from small_models import build_model, save_model, sequences

from tepo.core.errors import InputError
from tepo.policy import Policy, PolicyConfig, load_policy
from tepo.policy.device import choose_device, choose_dtype
from tepo.policy.load import end_ids
from tepo.policy.source import find_source
from tepo.policy.tiny import CHARACTERS

Load = Callable[..., Policy]
FolderOf = Callable[[str], Path]


def test_importing_the_room_loads_neither_torch_nor_transformers_nor_pydantic() -> None:
    code = (
        "import sys, tepo.policy; print([n for n in ('torch', 'transformers', 'pydantic', 'peft') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_loader_module_does_not_load_transformers() -> None:
    code = "import sys, tepo.policy.load; print([n for n in ('transformers', 'peft', 'gguf') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tiny_model_is_a_function_of_the_seed_and_leaves_the_global_generator_alone() -> None:
    config = PolicyConfig(path="builtin:tiny", device="cpu")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = load_policy(config, seed=4).state_tensors()
    assert torch.equal(torch.rand(3), expected)
    again, other = load_policy(config, seed=4).state_tensors(), load_policy(config, seed=5).state_tensors()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert 1.7e6 < sum(value.numel() for value in first.values()) < 1.9e6


def test_the_tiny_tokenizer_returns_every_character(load: Load) -> None:
    policy = load("builtin:tiny")
    ids = policy.encode([{"role": "user", "content": CHARACTERS}], chat=False)
    assert len(ids) == len(CHARACTERS)
    assert policy.decode(ids) == CHARACTERS
    assert policy.decode([*ids[:2], *policy.eos_ids]) == CHARACTERS[:2]
    assert policy.decode(policy.eos_ids, special=True) == "<eos>"


def test_messages_are_joined_by_newlines_without_a_chat_template(load: Load) -> None:
    policy = load("builtin:tiny")
    ids = policy.encode([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}], chat=False)
    assert policy.decode(ids) == "Add.\n1+2="
    assert not policy.has_chat_template
    with pytest.raises(InputError, match="no chat template"):
        policy.encode([{"role": "user", "content": "x"}], chat=True)


def test_a_chat_template_writes_the_turns_and_opens_the_answer(load: Load) -> None:
    policy = load("builtin:tiny")
    policy.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    ids = policy.encode([{"role": "user", "content": "1+2"}], chat=True)
    assert policy.decode(ids) == "[user] 1+2\n[assistant] "


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [([5, 7], 5, 9, (5, 7, 9)), (None, [3, 4], None, (3, 4)), (2, 2, 2, (2,)), (-1, 6, None, (6,))],
)
def test_every_end_token_counts(
    generation: object, config: object, tokenizer: object, expected: tuple[int, ...]
) -> None:
    text = SimpleNamespace(eos_token_id=config)
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation), config=SimpleNamespace(get_text_config=lambda: text)
    )
    assert end_ids(model, SimpleNamespace(eos_token_id=tokenizer)) == expected


def test_a_model_without_an_end_token_is_refused() -> None:
    text = SimpleNamespace(eos_token_id=None)
    model = SimpleNamespace(generation_config=None, config=SimpleNamespace(get_text_config=lambda: text))
    with pytest.raises(InputError, match="no response would ever end"):
        end_ids(model, SimpleNamespace(eos_token_id=None))


def test_several_end_tokens_are_read_from_a_folder(tmp_path: Path) -> None:
    model = build_model("llama")
    model.generation_config.eos_token_id = [2, 10]
    folder = save_model(model, tmp_path / "model")
    assert load_policy(PolicyConfig(path=str(folder), device="cpu")).eos_ids == (2, 10)


@pytest.fixture
def broken(folder_of: FolderOf, tmp_path: Path) -> Path:
    """A copy of a good model folder, to be damaged."""
    return Path(shutil.copytree(folder_of("llama"), tmp_path / "broken"))


def _load_error(path: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        load_policy(PolicyConfig(path=str(path), device="cpu"))
    return str(caught.value)


def test_a_folder_without_weights(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "no weights: expected model.safetensors" in _load_error(broken)
    (broken / "model.gguf").touch()
    assert "GGUF files are not read" in _load_error(broken)


def test_a_folder_without_configuration(broken: Path) -> None:
    (broken / "config.json").unlink()
    assert "has no config.json" in _load_error(broken)


def test_a_run_folder_points_at_the_model_inside(broken: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(broken, run / "model")
    assert f"did you mean {str(run / 'model')!r}" in _load_error(run)


def test_a_folder_without_tokenizer(broken: Path) -> None:
    for file in broken.glob("*token*"):
        file.unlink()
    assert "no tokenizer" in _load_error(broken)


def test_a_configuration_that_is_not_json(broken: Path) -> None:
    (broken / "config.json").write_text("{")
    assert "could not be loaded" in _load_error(broken)


def test_a_truncated_weight_file(broken: Path) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "could not be loaded" in _load_error(broken)


def test_missing_weights_are_not_replaced_by_random_ones(broken: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 weights" in _load_error(broken)
    assert "model.layers.1.mlp.up_proj.weight" in _load_error(broken)


def test_a_quantised_model_is_refused(broken: Path) -> None:
    settings = json.loads((broken / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (broken / "config.json").write_text(json.dumps(settings))
    assert "quantised" in _load_error(broken)


def test_a_missing_folder_names_the_nearest(broken: Path) -> None:
    assert f"Did you mean {str(broken)!r}" in _load_error(broken.with_name("brokne"))
    assert "Nor is there a folder" in _load_error(broken.parent / "none" / "model")


def test_a_file_is_not_a_model(broken: Path) -> None:
    assert "is a file" in _load_error(broken / "config.json")


def test_an_unknown_builtin_names_the_nearest() -> None:
    assert "Did you mean 'builtin:tiny'" in _load_error("builtin:tinny")


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen3-0.6B", "a/b.c-d_e"])
def test_hub_ids(path: str) -> None:
    assert find_source(path).kind == "hub"


def test_a_hub_id_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import transformers

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("We couldn't connect\nmore")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    message = _load_error("my-modle")
    assert "there is no such folder here. Did you mean 'my-model'?" in message
    assert message.endswith("As a hub id it could not be loaded: We couldn't connect")


def test_devices_and_precisions() -> None:
    cpu = choose_device("cpu")
    assert choose_dtype("auto", cpu, 1_000_000) == torch.float32
    assert choose_dtype("bfloat16", cpu, 1) == torch.bfloat16
    with pytest.raises(InputError, match="no torch device"):
        choose_device("gpu-please")
    with pytest.raises(InputError, match="CUDA device"):
        choose_device("cuda:99")


def test_auto_takes_bfloat16_only_where_the_hardware_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("tepo.policy.device.has_native_bfloat16", lambda device, native=native: native)
        assert choose_dtype("auto", torch.device("cpu"), 10**9) == expected


def test_device_and_precision_are_said(load: Load) -> None:
    said: list[str] = []
    load("llama", say=said.append)
    assert len(said) == 1
    assert "float32 compute on cpu" in said[0]


def test_unknown_configuration_keys_are_errors() -> None:
    with pytest.raises(ValidationError, match="extra"):
        PolicyConfig.model_validate({"path": "x", "pathh": "y"})


def test_every_field_of_the_configuration_is_documented() -> None:
    from tepo.policy import LoraConfig

    for model in (PolicyConfig, LoraConfig):
        assert all(field.description for field in model.model_fields.values())


def test_a_saved_policy_is_loaded_by_transformers_and_by_us(load: Load, tmp_path: Path) -> None:
    import transformers

    policy = load("builtin:tiny")
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.mul_(1.25)
    policy.save(tmp_path / "saved")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = policy.encode([{"role": "user", "content": "12 + 3\n= ?"}], chat=False)
    assert tokenizer("12 + 3\n= ?")["input_ids"] == ids
    torch.testing.assert_close(model(torch.tensor([ids])).logits, policy.model(torch.tensor([ids])).logits)
    again = load_policy(PolicyConfig(path=str(tmp_path / "saved"), device="cpu"))
    rows = sequences()
    assert torch.equal(again.score(rows).logp, policy.score(rows).logp)
    assert again.eos_ids == policy.eos_ids


def test_saving_keeps_the_dropout_of_the_configuration(load: Load, tmp_path: Path) -> None:
    load("llama").save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["attention_dropout"] == 0.5


def test_state_tensors_restore_a_policy(load: Load) -> None:
    policy, other = load("llama-tied"), load("llama-tied")
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.1)
    state: dict[str, Any] = {name: value.clone() for name, value in policy.state_tensors().items()}
    assert "lm_head.weight" not in state  # tied: once
    other.load_state_tensors(state)
    assert torch.equal(other.score(sequences()).logp, policy.score(sequences()).logp)
    name = next(iter(state))
    with pytest.raises(InputError, match="unknown tensor 'extra'"):
        other.load_state_tensors(state | {"extra": torch.zeros(1)})
    with pytest.raises(InputError, match="the model's is"):
        other.load_state_tensors(state | {name: torch.zeros(1)})
    del state[name]
    with pytest.raises(InputError, match="lacks tensor"):
        other.load_state_tensors(state)
