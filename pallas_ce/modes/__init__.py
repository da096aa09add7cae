"""The two ways of differentiating a streamed head: `recompute` and `in_forward`; DESIGN.md compares them."""
