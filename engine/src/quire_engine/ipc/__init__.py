"""The way between the API process and the engine process: messages, the engine's loop, the asynchronous client."""
