"""`mmaccel serve`: an HTTP server for OpenAI clients, and for video streams that are watched and asked about."""
