"""Model folders that every side of a benchmark loads: made once, kept in build/benchmarks until that is removed.

    python benchmarks/models.py tiny-endless       # make it (where it is missing) and print its folder

smollm2, tiny             the built-in models as transformers folders
smollm2-endless, tiny-endless
                          the same weights; what ends a response is a token beyond the vocabulary, which no side can
                          sample. So every response fills its length, and no side pays for suppressing a token.
tiny-4-32                 tiny after some supervised steps on alphabets cut at a uniform length: its responses end
                          by themselves after 4 to 32 tokens, each length about as often
random-h64-l2-v1000       a random Llama of that width, number of layers and vocabulary, endless too
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "build" / "benchmarks"
SUPERVISED_STEPS = 200
SHORTEST, LONGEST = 4, 32
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"


def ensure(name: str) -> Path:
    """Return the model's folder, made in a process of its own where it is missing."""
    folder = FOLDER / name
    if not folder.is_dir():
        print(f"making the model {name}", file=sys.stderr, flush=True)
        command = [sys.executable, str(Path(__file__).resolve()), name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"the model {name} could not be made:\n{done.stderr[-2000:]}")
    return folder


def make(name: str) -> Path:
    """Make the folder aside and rename it, so that it is whole or absent."""
    folder = FOLDER / name
    if folder.is_dir():
        return folder
    aside = FOLDER / f".{name}.{os.getpid()}"
    aside.mkdir(parents=True)
    try:
        _write(name, aside)
        if not folder.is_dir():  # another process may have made it meanwhile
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write(name: str, folder: Path) -> None:
    if name.endswith("-endless"):
        shutil.copytree(make(name.removesuffix("-endless")), folder, dirs_exist_ok=True, copy_function=_link)
        _make_endless(folder)
    elif sizes := re.fullmatch(r"random-h(\d+)-l(\d+)-v(\d+)", name):
        hidden, layers, vocabulary = map(int, sizes.groups())
        _random(hidden, layers, vocabulary).save_pretrained(folder)
        _tokenizer(vocabulary).save_pretrained(folder)
        _make_endless(folder)
    else:
        policy = _builtin("smollm2-135m" if name == "smollm2" else "tiny")
        if name == f"tiny-{SHORTEST}-{LONGEST}":
            _teach_lengths(policy.model, policy.tokenizer)
        policy.save(folder)


def _link(source: str, target: str) -> None:
    """Share the weights, copy what will be changed."""
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy(source, target)


def _builtin(name: str) -> Any:
    from tepo.policy import PolicyConfig, load_policy

    return load_policy(PolicyConfig(path=f"builtin:{name}", device="cpu"), seed=0)


def _tokenizer(vocabulary: int) -> Any:
    """Return the tiny model's character tokenizer with further tokens that no text holds."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = _builtin("tiny").tokenizer.get_vocab()
    further = {f"<unused-{index}>": index for index in range(len(known), vocabulary)}
    made = Tokenizer(models.WordLevel({**known, **further}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def _random(hidden: int, layers: int, vocabulary: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(1, hidden // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=8 * hidden // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
        )
    )


def _make_endless(folder: Path) -> None:
    """Let a token beyond the model's vocabulary be the one that ends responses."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    assert tokenizer.eos_token_id >= vocabulary, "the model could sample it"
    tokenizer.save_pretrained(folder)
    for file in ("config.json", "generation_config.json"):
        path = folder / file
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, "eos_token_id": tokenizer.eos_token_id}, indent=1), encoding="utf-8")


def _teach_lengths(model: Any, tokenizer: Any) -> None:
    """Train on the alphabet cut after a uniform number of tokens, the end token included.

    Each letter stands at one place only, so the model soon knows how likely the end is there.
    """
    import torch

    generator = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(SUPERVISED_STEPS):
        rows = []
        for _ in range(64):
            prompt = f"{generator.randrange(10)}+{generator.randrange(10)}="
            text = ALPHABET[: generator.randint(SHORTEST, LONGEST) - 1]
            rows.append((tokenizer(prompt)["input_ids"], [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        fill = [width - len(prompt) - len(answer) for prompt, answer in rows]
        ids = torch.tensor([[*p, *a, *[0] * n] for (p, a), n in zip(rows, fill, strict=True)])
        labels = torch.tensor([[*[-100] * len(p), *a, *[-100] * n] for (p, a), n in zip(rows, fill, strict=True)])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    print(make(sys.argv[1]))
