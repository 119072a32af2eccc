"""The way from exported functions to executables: allowlist, checker process, compiler, and backends of platforms."""
