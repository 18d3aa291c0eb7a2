"""`mmaccel serve`: an HTTP server for OpenAI clients, and for video streams to which clients send frames and questions."""
