"""A tiny DiffusionGemma with a vision tower, as transformers writes one, and pictures for it."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from support.models import GEMMA
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from transformers.models.diffusion_gemma import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

WORDS = ["<pad>", "<eos>", "<|turn>", "<turn|>", "<|image|>", "<|image>", "<image|>", "user", "model", "\n", " "]
TEMPLATE = (
    "{% for m in messages %}<|turn>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|image|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
VISION = {
    "model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "patch_size": 2, "pooling_kernel_size": 3,
    "position_embedding_size": 256, "standardize": True,
}  # fmt: skip
TEXT = GEMMA["text_config"] | {"pad_token_id": 0, "use_bidirectional_attention": "vision"}


def seeing() -> DiffusionGemmaForBlockDiffusion:
    """Random weights, whose norms and scalars differ from 1."""
    config = DiffusionGemmaConfig(
        text_config=TEXT, vision_config=VISION, canvas_length=6, image_token_id=4, boi_token_id=5, eoi_token_id=6
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = DiffusionGemmaForBlockDiffusion(config).eval()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name and "embed_scale" not in name:
                tensor.data.copy_(torch.randn_like(tensor) * (0.3 if tensor.dim() > 1 else 0.2) + (tensor.dim() < 2))
    return model


def save_seeing(theirs: DiffusionGemmaForBlockDiffusion, path: Path) -> Path:
    """A checkpoint with a tower."""
    theirs.save_pretrained(path)
    vocab = {word: i for i, word in enumerate([*WORDS, *(f"w{i}" for i in range(TEXT["vocab_size"] - len(WORDS)))])}
    words = Tokenizer(WordLevel(vocab, unk_token="w0"))
    words.pre_tokenizer = Split(Regex("\n| "), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS[:7]})
    tokenizer.save_pretrained(path)
    sizes = {"patch_size": 2, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    (path / "preprocessor_config.json").write_text(json.dumps(sizes))
    return path


def picture(seed: int, width: int = 20, height: int = 14) -> Image.Image:
    noise = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def png(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **how)
    return file.getvalue()
