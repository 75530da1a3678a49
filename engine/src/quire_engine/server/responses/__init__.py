"""OpenAI's Responses API over the same chats: its requests, items, events, and the responses that are kept."""
