"""The connection between the API process and the engine process: messages, the engine's loop, the async client."""
