"""Examples, smallest first: `figure2`, `ping_pong`, `language_model`. Each runs as `python -m examples.NAME`.

Each module has a `main(session=None, ...)` that uses the runtime already started by `pw.init` or `pw.connect`; only
when the module is run as a program does it start one of its own.
"""
