"""How rows and vocabulary are cut into blocks and tiles, and the loops over them. Knows no backend and no device."""
