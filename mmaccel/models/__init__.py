"""The supported families; importing this registers them and does not import transformers."""

from mmaccel.models import llava_onevision, qwen2_5_vl

__all__ = ["llava_onevision", "qwen2_5_vl"]
