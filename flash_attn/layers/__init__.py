"""Layers around attention: rotary position embedding."""
