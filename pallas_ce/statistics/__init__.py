"""Row statistics: the numbers kept of a row of logits, how parts merge, and how they are differentiated."""
