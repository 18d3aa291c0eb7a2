"""A draft model beside its target: finding it, and telling early when the two cannot speak of the same tokens."""

from __future__ import annotations

from torch import nn

from mmaccel.core.adapter import ModelView
from mmaccel.core.errors import DraftError, ModelError, RecipeError

PADDING = 1024


def check_model(name: str, model: object) -> None:
    """Raise `RecipeError` unless `model` is a folder's path or a module; `name` is the strategy's."""
    if not model or not isinstance(model, str | nn.Module):
        raise RecipeError(f"{name}: model is {model!r}; give the draft model's folder, or the loaded model.")


def same_vocabulary(a: int, b: int) -> bool:
    """Whether embeddings of `a` and `b` rows may be paddings of one vocabulary.

    Models of one family pad the same tokenizer to different multiples (151 936 and 152 064 rows, say). The rule: the counts
    differ by less than `PADDING` rows and by at most one in a hundred. Equal counts do not prove an equal tokenizer; a draft
    with another one costs speed, never correctness, since no token is committed that the target did not agree to.
    """
    gap = abs(a - b)
    return gap < PADDING and gap * 100 <= max(a, b)


def open_peer(name: str, target: ModelView, model: str | nn.Module) -> ModelView:
    """The draft model's view; raises `DraftError` for a missing model, another family and another vocabulary."""
    try:
        peer = target.peer(model)
    except ModelError as error:
        raise DraftError(f"{name}: model: {error}") from error
    if peer.adapter.name != target.adapter.name:
        raise DraftError(
            f"{name}: model: the draft is a {peer.adapter.name} and the target a {target.adapter.name}, which read other "
            "inputs; give a draft of the target's family."
        )
    ours, theirs = target.geometry.vocab, peer.geometry.vocab
    if not same_vocabulary(ours, theirs):
        raise DraftError(
            f"{name}: model: the draft has {theirs} token embeddings and the target {ours}; "
            "give a draft of the target's family."
        )
    return peer
