"""The command of the benchmark."""

from benchmarks.paper_tables.benchmark import BENCHMARK

raise SystemExit(BENCHMARK.main())
