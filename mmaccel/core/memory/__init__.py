"""KV memories: which keys and values of a sequence or a video stream are kept."""
