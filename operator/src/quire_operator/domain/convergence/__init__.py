"""The actions that bring the observed objects to the desired ones."""
