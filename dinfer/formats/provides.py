"""What core and other layers get from this one, see `dinfer.core.provided`."""

ADDRESSES = {
    "adapters": "dinfer.formats.adapters",
    "fill": "dinfer.formats.filling:fill",
    "format_of": "dinfer.formats.holding:format_of",
    "gguf_file": "dinfer.formats.gguf_file:gguf_file",
    "kept_formats": "dinfer.formats.holding:kept_formats",
    "read_adapter": "dinfer.formats.lora:read_adapter",
    "rounded_tensors": "dinfer.formats.quantized:rounded_tensors",
    "save_checkpoint": "dinfer.formats.saving:save_checkpoint",
}
