"""The text of a training: documents, tokeniser, packed rows."""
