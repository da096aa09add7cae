"""What computes: one folder a backend, each with the functions of `protocol.Backend`."""
