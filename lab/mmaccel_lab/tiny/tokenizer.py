"""The one tokenizer of the tiny models: a word is a token, anything else is bytes.

Text is lower-cased and cut at white space and around punctuation, so "What colour was the star?" and
"what colour was the star ?" give the same ids. A word of the closed vocabulary is exactly one id; a word outside it
is spelt in UTF-8 bytes. Decoding puts one space between words, which is the spelling of the synthetic world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 512
SPECIAL: tuple[str, ...] = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<video>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ROLES: tuple[str, ...] = ("system", "user", "assistant")

STAMPED = ("qwen3_vl", "qwen3_5")
"""The model types in whose prompts the time of each frame stands before it."""
# The words of such a time, after all others; each digit is one.
STAMP: tuple[str, ...] = ("<", ">", "seconds", *"0123456789")

_MARKED = "<|vision_start|><|{}_pad|><|vision_end|>"
_PADS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_ENDS = {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}

# What stands for an image and for a video in a prompt, by model type.
PLACEHOLDERS: dict[str, dict[str, str]] = {
    "llava_onevision": {"image": "<image>", "video": "<video>"},
    "qwen2_5_vl": {"image": _MARKED.format("image"), "video": _MARKED.format("video")},
    # The processor writes the marks around each frame itself.
    **{kind: {"image": _MARKED.format("image"), "video": "<|video_pad|>"} for kind in STAMPED},
}
NAMED: dict[str, dict[str, str]] = {
    "llava_onevision": {"image_token": "<image>", "video_token": "<video>"},
    "qwen2_5_vl": {**_PADS, "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"},
    **{kind: {**_PADS, **_ENDS} for kind in STAMPED},
}

# The Jinja chat template; message content is a string or a list of video, image and text pieces.
_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for piece in message['content'] %}"
    "{%- if piece['type'] == 'video' %}{{- '@video@' }}"
    "{%- elif piece['type'] == 'image' %}{{- '@image@' }}"
    "{%- else %}{{- piece['text'] }}{%- endif %}"
    "{%- if not loop.last %}{{- '\\n' }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def token_table(words: Sequence[str], more: Sequence[str] = ()) -> dict[str, int]:
    """Token string to id: special tokens, then the 256 bytes, then the words with their leading space mark, `more` last."""
    from tokenizers.pre_tokenizers import ByteLevel

    table = {token: place for place, token in enumerate(SPECIAL)}
    for char in sorted(ByteLevel.alphabet()):
        table.setdefault(char, len(table))
    for word in sorted({*words, *ROLES}):
        if not word.isascii() or word != word.lower():
            raise ValueError(f"The word {word!r} is not lower-case ASCII; the tiny tokenizer cannot hold it.")
        table.setdefault("Ġ" + word, len(table))
    for word in more:
        table.setdefault("Ġ" + word, len(table))
    if len(table) > VOCABULARY:
        raise ValueError(f"{len(table)} tokens do not fit in a vocabulary of {VOCABULARY}; raise VOCABULARY.")
    return table


def build_tokenizer(words: Sequence[str], model_type: str) -> PreTrainedTokenizerFast:
    """The tokenizer over `words` with the chat template and the named tokens of `model_type`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    stamped, marks = model_type in STAMPED, PLACEHOLDERS[model_type]
    pieces = r"\d|[^\W\d]+|[^\w\s]" if stamped else r"\w+|[^\w\s]"
    table = token_table(words, STAMP if stamped else ())
    # No merges: a piece is one token when it is in the table, and bytes otherwise.
    inner = Tokenizer(models.BPE(vocab=table, merges=[], ignore_merges=True))
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1, right=0)])
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        model_max_length=131072,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=NAMED[model_type],
        chat_template=_TEMPLATE.replace("@video@", marks["video"]).replace("@image@", marks["image"]),
    )
