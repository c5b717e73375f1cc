"""The bundled miniature: trained weights in Hugging Face layout, and the pages they can read."""
