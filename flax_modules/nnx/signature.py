"""A module's constructor, as `inspect.signature` and `help` show it."""

import inspect


class ConstructorSignature:
    """The `__signature__` of a class, from its `__init__`.

    NNX makes modules through a metaclass, and `inspect` would find its `__call__(*args, **kwargs)`. Instances have no
    `__signature__`, so that `inspect` shows their `__call__`.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])
