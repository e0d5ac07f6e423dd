"""Identify the model, the tokenizer and the tokens that a cache belongs to.

A cache is right for the weights, the configuration and the rotary embeddings that
made it, and garbage for any other, without an error. So a file records them, and
``differences`` says in which a live model differs. ``spec/v1/identity.md`` has
the bytes that each digest covers.

Works without mlx-lm, and imports MLX only when it meets a model.
"""

from vkv.identity.compare import differences, tokenizer_differences, unread_differences
from vkv.identity.model import model_id, of_model
from vkv.identity.ropes import find
from vkv.identity.tokenizer import of_tokenizer
from vkv.identity.tokens import common_prefix, of_tokens, token_bytes

__all__ = [
    "common_prefix",
    "differences",
    "find",
    "model_id",
    "of_model",
    "of_tokenizer",
    "of_tokens",
    "token_bytes",
    "tokenizer_differences",
    "unread_differences",
]
