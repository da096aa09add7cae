"""How a call is carried out: which implementation on which device, which backward mode, how much memory."""
