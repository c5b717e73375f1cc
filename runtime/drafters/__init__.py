"""Ways to draft, one interface."""
