"""`mmaccel serve`: the models over HTTP, as the OpenAI client asks, and streams that are watched and asked about."""
