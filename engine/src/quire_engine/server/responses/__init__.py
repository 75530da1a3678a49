"""OpenAI's Responses API over the same chats: its requests, items and events."""
