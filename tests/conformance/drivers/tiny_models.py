"""Two models of a few thousand weights: folders with a configuration and a tokenizer, for `--load-format dummy`."""

from __future__ import annotations

import os
import sys

VOCABULARY = 512


def make_tiny_models(folder: str) -> dict[str, str]:
    """Paths by kind: dense (Llama) and moe (Mixtral with four experts)."""
    from transformers import LlamaConfig, MixtralConfig

    shape = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }
    configurations = {
        "dense": LlamaConfig(architectures=["LlamaForCausalLM"], **shape),
        "moe": MixtralConfig(architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2, **shape),
    }
    paths = {}
    for kind, configuration in configurations.items():
        paths[kind] = os.path.join(folder, f"tiny-{kind}")
        _save_tokenizer(paths[kind])
        configuration.save_pretrained(paths[kind])
    return paths


def _save_tokenizer(path: str) -> None:
    """Bytes and a few pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["a tiny vocabulary for tests of conformance"] * 10, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(path)


if __name__ == "__main__":
    make_tiny_models(sys.argv[1])
