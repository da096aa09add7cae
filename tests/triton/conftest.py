"""What is only run with Triton's interpreter, in a process of its own, is not looked at in this one."""

collect_ignore = ["interpreted.py", "in_interpreter.py"]
