"""Chat templates in processes of their own: a template is a program whose cost a client's messages decide."""
