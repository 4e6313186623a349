"""builtin:tiny: a small random transformer with a character tokenizer, for studies and tests; nothing is downloaded."""

from __future__ import annotations

import string
from typing import Any

import torch

from tepo.core.seeds import address

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/=() \n" + string.ascii_letters + "!\"#$%&',.:;<>?@[\\]^_`{|}~"
MAX_POSITIONS = 2048


def tiny_tokenizer() -> Any:
    """Return the character tokenizer: every printable ASCII character, space and newline is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(seed: int) -> Any:
    """Return a Llama of 1.8 million float32 parameters (4 layers, width 192), its weights drawn from `seed`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(address(seed, "policy/tiny") % 2**63)
        model = LlamaForCausalLM(config)
    model.generation_config.pad_token_id = 0
    model.generation_config.bos_token_id = 1
    model.generation_config.eos_token_id = 2
    return model
