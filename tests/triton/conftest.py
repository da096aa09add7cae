"""Files for Triton's interpreter run in a process of their own; no other process collects them."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") else ["interpreted.py", "in_interpreter.py"]
