"""How a checked call reaches a backend: operations, autograd, the direct path. Not public."""
