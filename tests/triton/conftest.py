"""What is only run with Triton's interpreter, in a process of its own, is not looked at in another."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") else ["interpreted.py", "in_interpreter.py"]
