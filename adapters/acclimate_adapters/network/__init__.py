"""The frozen network and its passes: forward, gradient, replaced tensors, memory layouts."""
