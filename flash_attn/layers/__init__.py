"""Layers around attention: rotary position embedding, patches of images."""
