"""Ready-made modules: attention, feed-forward layers, embeddings, and blocks of them."""
