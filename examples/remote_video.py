"""Recipes on video models whose code is their own: LLaVA-Video, VideoChat-Flash, LongVILA.

Their class is a causal language model that also holds a vision tower; a prompt has one token, -200, in a video's place, and
`prepare_inputs_labels_for_multimodal` of their code makes embeddings of it. `wrap` gives such a model the form that
mmaccel knows, on the same weights, and `prompt` runs their code once and puts a placeholder where each visual token is:

    remote = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)  # or the class of their repository
    model = wrap(remote)
    inputs = prompt(remote, ids, video)  # ids [1, n] with one -200, video [T, 3, H, W] as their processor makes it
    with mmaccel.accelerate(model, "long-video"):
        new = model.generate(**inputs, max_new_tokens=128)[:, inputs["input_ids"].shape[1] :]

Patterns, kv `window` and drafts work; streams do not. Code whose function takes other arguments needs its own `embed`.
"""

import copy
from typing import ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import mmaccel
from mmaccel.models.generic import GenericFamily

IMAGE_TOKEN = -200
KIND = "remote_video"


@mmaccel.register("model", KIND)
class RemoteVideo(GenericFamily):
    """A wrapped model: the columns of each frame follow from its placeholders."""

    model_types = (KIND,)
    unable: ClassVar = {
        **GenericFamily.unable,
        "streams": "make visual features by code of their own, of whole videos",
    }


def embed(remote, ids, video):
    """[1, S, E]: the embeddings of a prompt, by the code of the checkpoint."""
    mask = torch.ones_like(ids)
    made = remote.prepare_inputs_labels_for_multimodal(
        ids, None, mask, None, None, [video], modalities=["video"]
    )
    return made[4]


@torch.no_grad()
def prompt(remote, ids, video, units=None, embed=embed):
    """The inputs of the wrapped model. `units`: steps of time that the video's tokens are of, as many of each; None: a
    frame is one. Tokens that are left over are marks at its end."""
    embeds = embed(remote, ids, video)
    at = int((ids[0] == IMAGE_TOKEN).nonzero())
    count = embeds.shape[1] - ids.shape[1] + 1
    units = len(video) if units is None else units
    placeholders = ids.new_full((1, count), remote.config.vocab_size - 1)
    ids = torch.cat([ids[:, :at], placeholders, ids[:, at + 1 :]], 1)
    features = embeds[:, at : at + count]
    # A video has five axes; the second are its steps of time, of which the tower has made tokens already.
    pixels = features[:, None, None].expand(-1, units, -1, -1, -1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values_videos": pixels}


class Joined(nn.Module):
    """The language model, and features in the places of their placeholders."""

    def __init__(self, remote, config):
        super().__init__()
        self.language_model, self.config = (
            remote.get_model() if hasattr(remote, "get_model") else remote.model,
            config,
        )

    def forward(self, input_ids=None, pixel_values_videos=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values_videos is not None:
            where = (input_ids == self.config.video_token_id)[..., None]
            features = pixel_values_videos[:, 0, 0].to(inputs_embeds)
            inputs_embeds = inputs_embeds.masked_scatter(where, features)
        return self.language_model(inputs_embeds=inputs_embeds, **kwargs)


class Wrapped(PreTrainedModel, GenerationMixin):
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, remote):
        config = copy.copy(remote.config)
        config.model_type, config.video_token_id, config.image_token_id = KIND, config.vocab_size - 1, None
        super().__init__(config)
        self.model, self.lm_head = Joined(remote, config), remote.lm_head
        self.generation_config = copy.deepcopy(remote.generation_config)

    def get_decoder(self):
        return self.model.language_model

    def get_input_embeddings(self):
        return self.model.language_model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(
        self,
        input_ids=None,
        pixel_values_videos=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        out = self.model(
            input_ids=input_ids,
            pixel_values_videos=pixel_values_videos,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)

    def prepare_inputs_for_generation(self, input_ids, is_first_iteration=False, **kwargs):
        made = super().prepare_inputs_for_generation(
            input_ids, is_first_iteration=is_first_iteration, **kwargs
        )
        first = is_first_iteration or not kwargs.get("use_cache", True)
        made["pixel_values_videos"] = kwargs.get("pixel_values_videos") if first else None
        return made


def wrap(remote):
    """`remote` in the form that mmaccel knows, on the same weights."""
    return Wrapped(remote).eval()
