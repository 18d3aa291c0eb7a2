"""The framework without any concrete policy or model: recipes, attention, KV memory, decoding, video streams. It names no
policy and no model family."""
