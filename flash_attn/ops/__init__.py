"""The operations around attention: norms, cross entropy, rotary embedding, activations, linears."""
