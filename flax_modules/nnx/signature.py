"""A module's constructor, as `inspect.signature` and `help` show it."""

import inspect


class ConstructorSignature:
    """The `__signature__` of a class: that of its `__init__`.

    NNX makes modules through a metaclass whose `__call__(*args, **kwargs)` is what `inspect` would find. Instances have
    none of their own, so that theirs stays the one of `__call__`.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])
