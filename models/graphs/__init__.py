"""Graph definitions of the networks, written once with onnx; only export imports them."""
