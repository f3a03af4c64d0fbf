# SPDX-License-Identifier: Apache-2.0
"""A tiny random vision model (BLIP-2: an encoder, a projector with queries, OPT) as a folder that vLLM loads.

Nothing is fetched: weights are drawn from a seed, and the tokenizer knows numbered words. BLIP-2, because it
is one of the few vision models that vLLM runs without torchvision. Runs in the environment of
``scripts/test-vllm``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

IMAGE_SIZE, PATCH_SIZE = 32, 8
NUM_IMAGE_TOKENS = 16
HIDDEN_SIZE = 64
NUM_WORDS = 120
SPECIAL = ("<pad>", "</s>", "<s>", "<image>")
VOCABULARY = 128

CONFIG: dict[str, Any] = {
    "architectures": ["Blip2ForConditionalGeneration"],
    "model_type": "blip-2",
    "image_token_index": SPECIAL.index("<image>"),
    "num_query_tokens": NUM_IMAGE_TOKENS,
    "use_decoder_only_language_model": True,
    "torch_dtype": "float32",
    "text_config": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN_SIZE,
        "word_embed_proj_dim": HIDDEN_SIZE,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "dropout": 0.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    "vision_config": {
        "model_type": "blip_2_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "qkv_bias": True,
    },
    "qformer_config": {
        "model_type": "blip_2_qformer",
        "hidden_size": 32,
        "intermediate_size": 64,
        "encoder_hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
IMAGES = {
    "image_processor_type": "BlipImageProcessor",
    "processor_class": "Blip2Processor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_std": [0.25, 0.25, 0.25],
    "resample": 3,
}


def make_model(folder: Path, seed: int = 0, mean: float = 0.5) -> Path:
    """Write the model to ``folder``. ``mean``: what the processor subtracts from the values of pixels."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import Blip2Config, Blip2ForConditionalGeneration, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *(f"w{number}" for number in range(NUM_WORDS))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    make_tokenizer: Any = PreTrainedTokenizerFast  # which has no annotations
    fast = make_tokenizer(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    model: Any = Blip2ForConditionalGeneration(Blip2Config(**CONFIG))
    for name, parameter in model.named_parameters():
        if "norm" not in name:  # transformers' own values are so small that answers are all alike
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": NUM_IMAGE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "preprocessor_config.json").write_text(json.dumps({**IMAGES, "image_mean": [mean] * 3}))
    return folder
