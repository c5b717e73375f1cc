"""What the networks are: typed configs, manifest, position, rope and grid rules.

Plain Python and NumPy, shared by export and runtime. Knows no ONNX, no sessions and no weights;
the graph definitions live in `graphs/`, which only export imports.
"""
