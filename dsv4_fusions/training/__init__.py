"""Training a byte-level decoder: text to packed rows, the jitted step, the loop."""
