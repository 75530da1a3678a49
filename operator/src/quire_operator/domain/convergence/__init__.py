"""The actions that change the observed into the desired state."""
