"""A question about a video with Qwen2.5-VL, as the model's card has it, and one line that makes a long video fast.

    python examples/stock_qwen.py Qwen/Qwen2.5-VL-7B-Instruct film.mp4 "What happens in the film?"

It needs accelerate, torchvision and qwen_vl_utils, and what these read video with (torchcodec or decord). Without the line
it is a stock script.
"""

import sys
from importlib.util import find_spec

import mmaccel

# isort: split
# After it: a torchvision built for CUDA then imports beside a torch for CPUs too (docs/troubleshooting.md).
import torchvision
from qwen_vl_utils import process_vision_info
from transformers import AutoModelForImageTextToText, AutoProcessor


def answer(name, video, question, recipe="long-video", max_new_tokens=128):
    model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto", device_map="auto")
    processor = AutoProcessor.from_pretrained(name)
    content = [{"type": "video", "video": video}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images, videos, how = process_vision_info(messages, return_video_kwargs=True, return_video_metadata=True)
    frames, told = zip(*videos, strict=True)
    inputs = processor(
        text=[text], images=images, videos=list(frames), video_metadata=list(told), return_tensors="pt", **how
    ).to(model.device)
    with mmaccel.accelerate(model, recipe):  # the line
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens)
    new = ids[:, inputs["input_ids"].shape[1] :]
    return processor.batch_decode(new, skip_special_tokens=True)[0], new


if __name__ == "__main__":
    if not (find_spec("torchcodec") or find_spec("decord") or hasattr(torchvision.io, "read_video")):
        sys.exit("qwen_vl_utils finds nothing to read video with; pip install torchcodec, or decord.")
    print(answer(*sys.argv[1:4])[0])
